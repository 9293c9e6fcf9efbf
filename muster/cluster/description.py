"""What a cluster file describes, and which descriptions are refused.

`muster.cluster.reading` reads one from a cluster file. A `Cluster` checks itself, so one that a
program builds obeys the same rules as one from a file.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import Meta

from muster.contracts.agent import LOOPBACK
from muster.contracts.errors import InvalidDescription
from muster.contracts.job.field_types import Megabytes, NodeName
from muster.contracts.job.problems import declared_fields, field_errors
from muster.contracts.settings.services import LOOPBACK_NAMES, SLOTS_PER_CORE

MemoryType: TypeAlias = Literal["discrete", "unified"]

USABLE_PERCENT: Final[Mapping[MemoryType, int]] = {"discrete": 85, "unified": 60}
"""Of a GPU's memory; the rest is for the driver and, where it is unified, for the system."""

_Count: TypeAlias = Annotated[int, Meta(ge=1, le=4096)]


def _text(characters: str, most: int, wanted: str) -> Meta:
    # No text begins with "-", which ssh and other commands would take for an option.
    return Meta(pattern=f"^[A-Za-z0-9_]{characters}{{0,{most - 1}}}$", extra={"wanted": wanted})


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of a node."""

    uuid: Annotated[str, _text("[A-Za-z0-9_./:-]", 128, "use the UUID that nvidia-smi -L shows")]
    type: Annotated[str, _text("[ -~]", 64, "use a model's name, such as RTX 4090")]
    vram_mb: Megabytes
    memory_type: MemoryType = "discrete"

    @property
    def usable_vram_mb(self) -> int:
        """The memory that ranks may have, rounded down."""
        return self.vram_mb * USABLE_PERCENT[self.memory_type] // 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One machine; `host` is its address."""

    name: NodeName
    host: Annotated[str, _text("[A-Za-z0-9_.:%-]", 253, "use a host name or an address")]
    transport: Literal["local", "ssh", "mesh"] = "local"
    user: Annotated[str, _text("[A-Za-z0-9_.-]", 32, "use a login name")] | None = None
    """None: the current user."""
    gpus: tuple[Gpu, ...] = ()
    max_adapters: _Count = 1
    """How many jobs may run there at once."""
    slots: _Count | None = None
    """How many ranks may run there at once; see `rank_slots`."""
    cpu_cores: _Count | None = None
    ram_mb: Megabytes | None = None

    @property
    def rank_slots(self) -> int | None:
        """The given slots, else twice the cores. None: only the machine itself knows."""
        if self.slots is None and self.cpu_cores is not None:
            return SLOTS_PER_CORE * self.cpu_cores
        return self.slots


class UndescribedNode(ClusterNode):
    """The machine of a service without a cluster file: only it knows its GPUs and its memory.

    A job larger than all its slots runs alone.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines of a cluster file, in the order of the file. Raises `InvalidDescription`."""

    nodes: tuple[ClusterNode, ...]

    def __post_init__(self) -> None:
        if self.is_described:
            check_description(asdict(self))

    @property
    def is_described(self) -> bool:
        """False for the one machine of a service without a cluster file."""
        return not any(isinstance(node, UndescribedNode) for node in self.nodes)

    @property
    def capacity(self) -> int:
        """How many jobs may run at once: the sum of `max_adapters`."""
        return sum(node.max_adapters for node in self.nodes)

    def node(self, name: str) -> ClusterNode:
        """Return the node of this name; raises `InvalidDescription` if there is none."""
        nodes = {node.name: node for node in self.nodes}
        if name not in nodes:
            raise InvalidDescription(f"there is no node {name!r}: use one of {', '.join(nodes)}")
        return nodes[name]

    def __str__(self) -> str:
        header = f"nodes: {len(self.nodes)}, adapter slots: {self.capacity}"
        return "\n".join([header, *map(_line, self.nodes)])


def cluster_of_service(path: Path | None, name: str, slots: int) -> Cluster:
    """Return the machines of a service; `name` and `slots` are those of its own machine.

    A description names it otherwise, and may have other slots. Raises `InvalidDescription`.
    """
    if path is None:
        own = UndescribedNode(name=name, host=LOOPBACK, slots=slots, max_adapters=slots)
        return Cluster(nodes=(own,))
    # Imported here: without a cluster file services start without the YAML reader.
    from muster.cluster.reading import read_cluster  # noqa: PLC0415

    cluster = read_cluster(path)
    local = [node.name for node in cluster.nodes if node.transport == "local"]
    if len(local) > 1:
        raise InvalidDescription(
            f"{path}: {' and '.join(local)} have the transport local, which is this one machine: "
            "write transport: ssh for the others"
        )
    nodes = (
        replace(node, slots=slots)
        if node.transport == "local" and node.rank_slots is None
        else node
        for node in cluster.nodes
    )
    return Cluster(nodes=tuple(nodes))


def _line(node: ClusterNode) -> str:
    host = node.host if node.user is None else f"{node.user}@{node.host}"
    gpus = (f"{gpu.type} ({gpu.usable_vram_mb} of {gpu.vram_mb} MB usable)" for gpu in node.gpus)
    hardware = " + ".join(gpus) or "CPU-only"
    return (
        f"  {node.name}: {host}, {node.transport}, {hardware}, slots: {node.rank_slots or 'auto'}"
    )


_Location: TypeAlias = tuple[str | int, ...]
"""Where a value is in a description, such as ``("nodes", 0, "host")``."""
_Found: TypeAlias = dict[_Location, dict[Any, Any]]
_Reasons: TypeAlias = Iterator[tuple[_Location, str]]


def check_description(
    document: Any,  # noqa: ANN401  parsed YAML
    file: str = "",
    line_of: Callable[[_Location], int] | None = None,
) -> None:
    """Raise `InvalidDescription` for the first reason to refuse a parsed description."""
    for location, message in _reasons(document):
        words = [f"{file}:{line_of(location)}"] if line_of else []
        if location[1:]:
            index = location[1]
            name = dict(_mappings(document, "nodes")).get(index, {}).get("name")
            words.append(f"node {name or index}")
        raise InvalidDescription(": ".join([*words, message]))


def _reasons(document: object) -> _Reasons:
    """Yield why a description is refused: rule by rule, each for all nodes."""
    if not isinstance(document, dict) or not document.get("nodes"):
        yield (), "there are no nodes: list them under nodes:, each with a name and a host"
        return
    nodes: _Found = {("nodes", index): node for index, node in _mappings(document, "nodes")}
    gpus: _Found = {
        (*place, "gpus", index): gpu
        for place, node in nodes.items()
        for index, gpu in _mappings(node, "gpus")
    }
    for place in _repeated({place: node.get("name") for place, node in nodes.items()}):
        yield (*place, "name"), "an earlier node has this name: choose another"
    for place, node in nodes.items():
        if node.get("max_adapters") == 0:
            message = "max_adapters is 0: write how many jobs may run there, or leave out the node"
            yield (*place, "max_adapters"), message
    hosts = [str(node.get("host", place)).lower().rstrip(".") for place, node in nodes.items()]
    for (place, node), host in zip(nodes.items(), hosts, strict=True):
        if node.get("transport") == "ssh" and (problem := _host_problem(host, hosts)):
            yield (*place, "host"), f"host {node['host']} {problem}"
    for place, gpu in gpus.items():
        if gpu.get("vram_mb") == 0:
            message = f"GPU {gpu.get('uuid')} has vram_mb 0: write the MB that nvidia-smi shows"
            yield (*place, "vram_mb"), message
    uuids = {place: (place[1], gpu["uuid"]) for place, gpu in gpus.items() if "uuid" in gpu}
    for place in _repeated(uuids):
        message = f"GPU {gpus[place]['uuid']} is listed twice: write each once (nvidia-smi -L)"
        yield (*place, "uuid"), message
    yield from _undeclared(document)


def _host_problem(host: str, hosts: Sequence[str]) -> str | None:
    """Return why no other machine is reached by this name alone, which is one of several."""
    if host in LOOPBACK_NAMES or host.startswith(("127.", "0.")):
        return "is this machine: write another's address, or transport: local"
    if host.count(":") == 1:
        return "has a port: leave it out, and write it as Port into ~/.ssh/config"
    return "is that of another node, too: list each machine once" if hosts.count(host) > 1 else None


def _mappings(parsed: dict[Any, Any], key: str) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """Yield the mappings in the list below a key, with their places in it."""
    entries = parsed.get(key)
    if isinstance(entries, list | tuple):
        yield from ((index, item) for index, item in enumerate(entries) if isinstance(item, dict))


def _repeated(names: Mapping[_Location, object]) -> Iterator[_Location]:
    """Yield the places whose names an earlier place has."""
    seen = list(names.values())  # a wrong type may have no hash
    for index, (place, name) in enumerate(names.items()):
        if name is not None and name in seen[:index]:
            yield place


def _undeclared(document: dict[Any, Any]) -> _Reasons:
    """Yield unknown and missing keys, and values of another type or beyond their limits."""
    yield from _errors(document, Cluster, ())
    for index, node in enumerate(document["nodes"]):
        yield from _errors(node, ClusterNode, ("nodes", index))
        for place, gpu in enumerate(node.get("gpus", ())):
            yield from _errors(gpu, Gpu, ("nodes", index, "gpus", place))


def _errors(parsed: object, kind: type, location: _Location) -> _Reasons:
    for error in field_errors(parsed, kind):
        where = ".".join(map(str, (*location[2:], *error.loc[1:])))
        hint = error.hint or f"the keys are {', '.join(declared_fields(kind))}"
        hint = f" ({hint})" if error.type in {"extra_forbidden", "missing"} else ""
        yield (*location, *error.loc[1:]), f"{where and f'{where}: '}{error.msg}{hint}"
