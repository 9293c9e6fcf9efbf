"""How an environment variable is declared and read: name, type, limits, meaning.

An empty variable counts as unset.
"""

from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from muster.contracts.errors import InvalidEnvironment
from muster.contracts.job.field_types import KeepBest
from muster.contracts.location import (
    SCHEME,
    InvalidLocation,
    Location,
    expand_home,
    parse_location,
)
from muster.contracts.settings.names import ORPHAN_TIMEOUT

_DIRECTORIES: Final[Mapping[str, str]] = {
    "CHECKPOINT_DIR": "checkpoints",
    "DATASET_DIR": "data/shards",
}
"""The defaults, below the current directory."""

INTEGER_MAX: Final = 2**63 - 1
SECONDS_LIMIT: Final = 1e9

_UNIONS: Final = (Union, UnionType)


class Variable(NamedTuple):
    """The declaration of one environment variable, as the metadata of a settings field."""

    name: str
    meaning: str = ""
    low: float | None = None
    high: float | None = None

    def parse(self, text: str, kind: Any) -> Any:  # noqa: ANN401  a type and its value
        """Return `text` as a value of type `kind`, or raise `InvalidEnvironment`."""
        bare, limited = bare_type(kind), kind
        if self.high is not None and get_origin(bare) not in _UNIONS:
            limited = Annotated[bare, Meta(ge=self.low, le=self.high)]
        value: object = text
        try:
            if bare in (Path, Location):
                value = text = expand_home(text)
            if bare == Location:
                return parse_location(text, Path().absolute())
            if bare is range:
                return _port_range(text)
            if bare is Path and text.startswith(SCHEME):
                raise InvalidEnvironment(
                    self.name, text, "a path, as this cannot be in a store yet"
                )
            if get_origin(bare) is tuple or bare is KeepBest:
                value = msgspec.json.decode(text) or {}  # an empty list is no command
            elif get_origin(bare) is frozenset:
                value = [word.strip() for word in text.lower().split(",") if word.strip()]
            elif bare is bool:
                value = {"yes": "true", "no": "false"}.get(text.lower(), text)
            return msgspec.convert(value, limited, strict=False, dec_hook=_path)
        except (msgspec.MsgspecError, InvalidLocation, ValueError, RecursionError):
            raise InvalidEnvironment(self.name, text, self._wanted(bare)) from None

    def _wanted(self, kind: Any) -> str:  # noqa: ANN401  a type
        if get_origin(kind) is Literal:
            return f"one of {', '.join(get_args(kind))}"
        if get_origin(kind) is tuple:
            return 'a JSON list of words, such as ["python", "train.py"]'
        if kind == Location:
            return "a path, or s3://bucket/prefix"
        if get_origin(kind) in _UNIONS:
            number, words = get_args(kind)
            return f"{self._wanted(bare_type(number))}, or {' or '.join(get_args(words))}"
        if kind is range:
            return "two ports, such as 29600-29999"
        words = {bool: "1 or 0", int: "an integer", float: "a number", Path: "a path"}
        wanted = str(words.get(kind, 'JSON such as {"metric": "val_loss"}'))
        if kind is bool or self.high is None:
            return wanted
        low = f"{self.low or 0:.15g}"
        if self.high >= SECONDS_LIMIT:
            return f"{wanted}, {low} or more"
        return f"{wanted} from {low} to {self.high:.15g}"


def variables_of(settings: type[msgspec.Struct]) -> dict[str, tuple[Variable, Any]]:
    """Return the variable and the type of each field of a settings class that has a variable."""
    found = {}
    for field, hint in get_type_hints(settings, include_extras=True).items():
        for variable in getattr(hint, "__metadata__", ()):
            found[field] = variable, hint.__origin__
    return found


ORPHAN_VARIABLE: Final = Variable(
    ORPHAN_TIMEOUT,
    "Seconds that ranks go on without a coordinator before they checkpoint and exit.",
    0,
    SECONDS_LIMIT,
)

RANK_PORTS: Final = Variable(
    "MUSTER_RANK_PORTS",
    "Ports at which the ranks of a host accept those of other hosts, such as `29600-29999`.",
)

SAME_ON_ALL_HOSTS: Final = (
    *("OPENBLAS_", "NPY_", "MKL_", "ATEN_", "NVPL_BLAS_"),  # how numbers are computed
    *("S3_", "AWS_"),  # which object store it is; its keys travel apart
    RANK_PORTS.name,
)
"""How the variables of the coordinator begin that agents on other hosts get."""

TRACE: Final = Variable(
    "MUSTER_TRACE", "Absolute path of a file to which every process appends its time stamps."
)

USE_S3: Final = Variable(
    "USE_S3", "`1`: checkpoints and data that name no place are in the bucket."
)
S3_BUCKET: Final = Variable("S3_BUCKET", "The bucket of `USE_S3`.")
DEFAULT_BUCKET: Final = "training-data"


def read_fields(settings: type[msgspec.Struct], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields whose variables are set, and the default places."""
    defaults = _DIRECTORIES
    if USE_S3.parse(environ.get(USE_S3.name) or "0", bool):
        bucket = f"{SCHEME}{environ.get(S3_BUCKET.name) or DEFAULT_BUCKET}"
        defaults = {"CHECKPOINT_DIR": f"{bucket}/checkpoints", "DATASET_DIR": f"{bucket}/shards"}
    return {
        field: variable.parse(text, kind)
        for field, (variable, kind) in variables_of(settings).items()
        if (text := environ.get(variable.name) or defaults.get(variable.name))
    }


def bare_type(kind: Any) -> Any:  # noqa: ANN401  a type
    """Return a type without its annotations and without None."""
    if get_origin(kind) is Annotated:
        return bare_type(get_args(kind)[0])
    if NoneType in get_args(kind):
        return bare_type(next(part for part in get_args(kind) if part is not NoneType))
    return kind


def _port_range(text: str) -> range:
    low, high = map(int, text.split("-"))
    if not 0 < low <= high < 1 << 16:
        raise ValueError(text)
    return range(low, high + 1)


def _path(_: type, text: str) -> Path:
    return Path(text).absolute()
