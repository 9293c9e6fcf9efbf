"""Whether two processes would compute the same bits, told in milliseconds before it matters.

Additions and square roots are the same everywhere. Matrix products and exponentials are not: they
change with the number of BLAS threads, the kernels BLAS chose for the processor, numpy's SIMD level
and the versions of both. So a worker computes a handful of such things from fixed inputs, and one
whose results differ is turned away before it can contribute, with the setting that differs.
"""

import ctypes
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

Array: TypeAlias = NDArray[Any]

_UNKNOWN: Final = "unknown"

_GEMM_SHAPES: Final = ((8, 64, 10), (17, 33, 5), (32, 784, 256))
"""(rows, inner, columns). The last is cut among threads where there are several."""

_DOT_LENGTH: Final = 20_011
_UFUNC_LENGTH: Final = 1003
"""Odd, so that the last elements are computed by the code for what is left over."""

_UFUNCS: Final = (np.exp, np.log1p, np.tanh, np.sin)

_PERIOD: Final = 4099
"""Values repeat after so many, to be made quickly; a prime, so that no two rows are alike."""

_KERNELS: Final = (
    "Prescott",
    "Nehalem",
    "Sandybridge",
    "Haswell",
    "SkylakeX",
    "Cooperlake",
    "Sapphirerapids",
)
"""OpenBLAS's names for generations of processors; each can run the kernels of those before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Equal digests: the same bits, as far as a handful of operations can tell."""

    digest: str
    facts: Mapping[str, str]
    """What usually explains a difference; ``unknown`` where it cannot be found out."""


def fingerprint() -> Fingerprint:
    """Return the fingerprint of this process, as it is set up now."""
    digest = xxhash.xxh3_128()
    with np.errstate(all="ignore"):  # the smallest numbers are among them
        for result in _results():
            digest.update(np.ascontiguousarray(result).data)
    return Fingerprint(digest=digest.hexdigest(), facts=_facts())


def explain(ours: Fingerprint, theirs: Fingerprint) -> str:
    """Return a sentence that says why `ours` is not `theirs`, and what to set on which side."""
    if ours.digest == theirs.digest:
        return "both compute the same bits"
    told = [
        f"{name} is {_fact(ours, name)} here and {_fact(theirs, name)} there: {remedy}"
        for name, remedy_for in _REMEDIES.items()
        if _fact(ours, name) != _fact(theirs, name)
        for remedy in [remedy_for(_fact(ours, name), _fact(theirs, name))]
    ]
    return "this process does not compute the same bits as the job; " + (
        "; ".join(told)
        or "versions and settings are the same, so the processors must differ: set "
        "OPENBLAS_CORETYPE and NPY_DISABLE_CPU_FEATURES to what both can do"
    )


def _fact(of: Fingerprint, name: str) -> str:
    return of.facts.get(name, _UNKNOWN)


def _results() -> Iterator[Array]:
    for dtype in (np.float32, np.float64):
        yield from _products(dtype)
        values = _values(_UFUNC_LENGTH, dtype)
        for ufunc in _UFUNCS:
            yield ufunc(values)
        yield np.power(values + dtype(1), dtype(1.7))
        yield values.sum(keepdims=True)
        square = values[:961].reshape(31, 31)
        yield square.sum(axis=0)
        yield square.mean(axis=1)
        # Some libraries make the processor take the smallest numbers for zero.
        yield values * np.finfo(dtype).tiny


def _products(dtype: DTypeLike) -> Iterator[Array]:
    """Yield products as a layer has them: forward, both backward ones, one row, a dot product."""
    for rows, inner, columns in _GEMM_SHAPES:
        left = _values(rows * inner, dtype).reshape(rows, inner)
        right = _values(inner * columns, dtype).reshape(inner, columns)
        product = left @ right
        yield product
        yield left.T @ product
        yield product @ right.T
        yield left[0] @ right
    dotted = _values(_DOT_LENGTH, dtype)
    yield np.array([dotted @ dotted])


def _values(count: int, dtype: DTypeLike) -> Array:
    """Return numbers in [-0.5, 0.5) that look random, by integers alone: the same everywhere."""
    words = np.arange(1, _PERIOD + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    values = (words >> np.uint64(40)).astype(np.float64) * 2.0**-24 - 0.5
    return np.resize(values.astype(dtype), count)


def _facts() -> dict[str, str]:
    built: Any = np.show_config(mode="dicts")
    blas = built["Build Dependencies"]["blas"]
    simd = built["SIMD Extensions"]
    library = _openblas()
    return {
        "the processor": platform.machine(),
        "numpy": np.__version__,
        "the BLAS library": f"{blas.get('name', _UNKNOWN)} {blas.get('version', _UNKNOWN)}",
        "the BLAS kernel": _ask(library, "corename", ctypes.c_char_p),
        "the number of BLAS threads": _ask(library, "num_threads", ctypes.c_int),
        "numpy's SIMD level": " ".join([*simd.get("baseline", []), *simd.get("found", [])]),
    }


def _openblas() -> ctypes.CDLL | None:
    """Return numpy's own OpenBLAS, which is loaded already, or None if that cannot be told."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in lines if "openblas" in line}
    # Another package may have brought in one more.
    numpys = sorted(paths, key=lambda path: ("numpy" not in path, path))
    return ctypes.CDLL(numpys[0], mode=os.RTLD_NOLOAD | os.RTLD_LAZY) if numpys else None


def _ask(library: ctypes.CDLL | None, what: str, kind: Any) -> str:  # noqa: ANN401  a C type
    for name in (
        f"scipy_openblas_get_{what}64_",
        f"openblas_get_{what}64_",
        f"openblas_get_{what}",
    ):
        function = getattr(library, name, None)
        if function is not None:
            function.restype = kind
            answer = function()
            return answer.decode() if isinstance(answer, bytes) else str(answer)
    return _UNKNOWN


def _same_processor(_ours: str, _theirs: str) -> str:
    return "only processors of one kind can share a job"


def _same_numpy(_ours: str, theirs: str) -> str:
    return f"install numpy {theirs} here"


def _same_library(_ours: str, _theirs: str) -> str:
    return "install the same wheel of numpy on both sides"


def _same_kernel(ours: str, theirs: str) -> str:
    if ours not in _KERNELS or theirs not in _KERNELS:
        return "set OPENBLAS_CORETYPE to the same on both sides"
    lower = min(ours, theirs, key=_KERNELS.index)
    return f"set OPENBLAS_CORETYPE={lower} {'there' if lower == ours else 'here'}"


def _one_thread(ours: str, theirs: str) -> str:
    sides = [side for side, threads in (("here", ours), ("there", theirs)) if threads != "1"]
    return f"set OPENBLAS_NUM_THREADS=1 {' and '.join(sides)}, before numpy is imported"


def _same_simd(ours: str, theirs: str) -> str:
    here, there = set(ours.split()), set(theirs.split())
    surplus = [("here", sorted(here - there)), ("there", sorted(there - here))]
    return " and ".join(
        f'set NPY_DISABLE_CPU_FEATURES="{" ".join(features)}" {side}'
        for side, features in surplus
        if features
    )


_REMEDIES: Final[Mapping[str, Callable[[str, str], str]]] = {
    "the processor": _same_processor,
    "numpy": _same_numpy,
    "the BLAS library": _same_library,
    "the BLAS kernel": _same_kernel,
    "the number of BLAS threads": _one_thread,
    "numpy's SIMD level": _same_simd,
}
