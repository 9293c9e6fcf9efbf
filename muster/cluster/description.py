"""What a cluster is made of, and which descriptions are refused.

`muster.cluster.reading` reads one from ``cluster.yaml``. A `Cluster` checks itself, so one that a
program builds obeys the same rules as one from a file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

from msgspec import Meta

from muster.contracts.errors import InvalidDescription
from muster.contracts.settings import LOOPBACK_NAMES, SLOTS_PER_CORE
from muster.contracts.spec import MB_LIMIT
from muster.contracts.spec_problems import declared_fields, field_errors

MemoryType: TypeAlias = Literal["discrete", "unified"]
Transport: TypeAlias = Literal["local", "ssh"]

USABLE_PERCENT: Final[Mapping[MemoryType, int]] = {"discrete": 85, "unified": 60}
"""Of a GPU's memory; the rest is for the driver and, where it is unified, for the system."""

_Megabytes: TypeAlias = Annotated[int, Meta(ge=1, le=MB_LIMIT)]
_Count: TypeAlias = Annotated[int, Meta(ge=1, le=4096)]


def _text(characters: str, most: int, wanted: str) -> Meta:
    """Return the declaration of a text that no shell, ssh or terminal takes for something else."""
    return Meta(pattern=f"^[A-Za-z0-9_]{characters}{{0,{most - 1}}}$", extra={"wanted": wanted})


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of a node."""

    uuid: Annotated[str, _text("[A-Za-z0-9_./:-]", 128, "use the UUID that nvidia-smi -L shows")]
    type: Annotated[str, _text("[ -~]", 64, "use a model's name, such as RTX 4090")]
    vram_mb: _Megabytes
    memory_type: MemoryType = "discrete"

    @property
    def usable_vram_mb(self) -> int:
        """The memory that ranks may have, in MB, rounded down."""
        return self.vram_mb * USABLE_PERCENT[self.memory_type] // 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One machine. `host` is its address, `user` the one for ssh: None is the current user."""

    name: Annotated[str, _text("[A-Za-z0-9_.-]", 63, "use up to 63 letters, digits, '.', '-', '_'")]
    host: Annotated[str, _text("[A-Za-z0-9_.:%-]", 253, "use a host name or an address")]
    transport: Transport = "local"
    user: Annotated[str, _text("[A-Za-z0-9_.-]", 32, "use the name of a login")] | None = None
    gpus: tuple[Gpu, ...] = ()
    max_adapters: _Count = 1
    """How many jobs may run there at once."""
    slots: _Count | None = None
    """How many ranks may run there at once; see `rank_slots`."""
    cpu_cores: _Count | None = None
    ram_mb: _Megabytes | None = None

    @property
    def rank_slots(self) -> int | None:
        """The slots that are given, else twice the cores. None: the machine itself will tell."""
        if self.slots is None and self.cpu_cores is not None:
            return SLOTS_PER_CORE * self.cpu_cores
        return self.slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines of a cluster, in the order of the file. Raises `ClusterError` if invalid."""

    nodes: tuple[ClusterNode, ...]

    def __post_init__(self) -> None:
        if refusal := first_refusal(asdict(self)):
            raise ClusterError(refusal)

    @property
    def capacity(self) -> int:
        """How many jobs may run at once: the sum of `max_adapters`."""
        return sum(node.max_adapters for node in self.nodes)

    def node(self, name: str) -> ClusterNode | None:
        """Return the node of this name, or None."""
        return next((node for node in self.nodes if node.name == name), None)

    def __str__(self) -> str:
        nodes = f"{len(self.nodes)} node{'s' * (len(self.nodes) != 1)}"
        slots = f"{self.capacity} adapter slot{'s' * (self.capacity != 1)}"
        return "\n".join([f"cluster: {nodes}, {slots}", *map(_line, self.nodes)])


def _line(node: ClusterNode) -> str:
    host = node.host if node.user is None else f"{node.user}@{node.host}"
    gpus = " + ".join(
        f"{gpu.type} ({gpu.usable_vram_mb} of {gpu.vram_mb} MB usable)" for gpu in node.gpus
    )
    slots = f"{node.rank_slots or 'auto'} slot{'s' * (node.rank_slots != 1)}"
    return f"  {node.name}: {host}, {node.transport}, {gpus or 'CPU-only'}, {slots}"


class Refusal(NamedTuple):
    """Why a description is refused, and where the reason is, such as ``("nodes", 0, "host")``."""

    location: tuple[str | int, ...]
    message: str
    node: str | None = None


class ClusterError(InvalidDescription):
    """A description that cannot be used. The sentence says what to write instead.

    `node` is the name of the node with the mistake, `line` the mistake's line in the file, from 1.
    """

    def __init__(self, refusal: Refusal, file: str = "", line: int | None = None) -> None:
        place = ":".join(str(part) for part in (file, line) if part)
        about = f"node {refusal.node}" if refusal.node else ""
        super().__init__(": ".join(part for part in (place, about, refusal.message) if part))
        self.node = refusal.node
        self.line = line


def first_refusal(document: object) -> Refusal | None:
    """Return the first reason to refuse a parsed description: rule by rule, each for all nodes."""
    if not isinstance(document, dict) or not document.get("nodes"):
        message = "there are no nodes: list them under nodes:, each with a name and a host"
        return Refusal((), message)
    nodes = _mappings(document["nodes"])
    rules = (
        _repeated_names,
        _without_adapters,
        _ssh_to_this_machine,
        _without_vram,
        _repeated_gpus,
    )
    for refusal in chain(*(rule(nodes) for rule in rules), _undeclared(document)):
        _, index, *_ = (*refusal.location, None, None)
        name = next((node.get("name", index) for place, node in nodes if place == index), None)
        return refusal._replace(node=None if name is None else str(name))
    return None


_Nodes: TypeAlias = Sequence[tuple[int, dict[Any, Any]]]
"""The parsed nodes, or GPUs, that are mappings, and their places in the list."""


def _mappings(parsed: object) -> _Nodes:
    entries = parsed if isinstance(parsed, list | tuple) else ()
    return [(place, entry) for place, entry in enumerate(entries) if isinstance(entry, dict)]


def _repeated_names(nodes: _Nodes) -> Iterator[Refusal]:
    names: list[object] = []
    for index, node in nodes:
        name = node.get("name")
        if name is not None and name in names:
            yield Refusal(("nodes", index, "name"), "an earlier node has this name: choose another")
        names.append(name)


def _without_adapters(nodes: _Nodes) -> Iterator[Refusal]:
    for index, node in nodes:
        if _is_zero(node.get("max_adapters")):
            message = "max_adapters is 0: write how many jobs may run there, or leave out the node"
            yield Refusal(("nodes", index, "max_adapters"), message)


def _ssh_to_this_machine(nodes: _Nodes) -> Iterator[Refusal]:
    for index, node in nodes:
        host = str(node.get("host"))
        if node.get("transport") == "ssh" and host.lower() in LOOPBACK_NAMES:
            yield Refusal(
                ("nodes", index, "host"),
                f"transport ssh needs the address of another machine, and {host} is this one: "
                "write that address, or transport: local",
            )


def _without_vram(nodes: _Nodes) -> Iterator[Refusal]:
    for index, node in nodes:
        for place, gpu in _mappings(node.get("gpus")):
            if _is_zero(gpu.get("vram_mb")):
                yield Refusal(
                    ("nodes", index, "gpus", place, "vram_mb"),
                    f"GPU {gpu.get('uuid')} has vram_mb 0: write the MB that nvidia-smi shows",
                )


def _repeated_gpus(nodes: _Nodes) -> Iterator[Refusal]:
    for index, node in nodes:
        uuids: list[object] = []
        for place, gpu in _mappings(node.get("gpus")):
            uuid = gpu.get("uuid")
            if uuid is not None and uuid in uuids:
                message = f"GPU {uuid} is listed twice: write the uuid of each (nvidia-smi -L)"
                yield Refusal(("nodes", index, "gpus", place, "uuid"), message)
            uuids.append(uuid)


def _undeclared(document: dict[Any, Any]) -> Iterator[Refusal]:
    """Yield unknown and missing keys, and values of another type or beyond their limits."""
    yield from _errors(document, Cluster, ())
    for index, node in enumerate(document["nodes"]):
        yield from _errors(node, ClusterNode, ("nodes", index))
        for place, gpu in enumerate(node.get("gpus", ())):
            yield from _errors(gpu, Gpu, ("nodes", index, "gpus", place))


def _errors(parsed: object, kind: type, location: tuple[str | int, ...]) -> Iterator[Refusal]:
    for error in field_errors(parsed, kind):
        within = error.loc[1:]
        # A GPU has no name of its own in the sentence.
        where = ".".join(map(str, (*location[2:], *within)))
        hint = error.hint or f"the keys are {', '.join(declared_fields(kind))}"
        hint = f" ({hint})" if error.type in {"extra_forbidden", "missing"} else ""
        yield Refusal((*location, *within), f"{where}: {error.msg}{hint}")


def _is_zero(value: object) -> bool:
    return type(value) is int and value == 0
