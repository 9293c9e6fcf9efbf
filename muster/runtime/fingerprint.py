"""Finds out in milliseconds whether two processes would compute the same bits.

Additions and square roots have the same bits everywhere. Matrix products and exponentials do not:
they depend on the number of BLAS threads, the kernels BLAS chose for the processor, numpy's SIMD
level and both versions. Each worker computes a few of them from fixed inputs; a worker whose
results differ is refused before it contributes, and the message names the setting that differs.
"""

import ctypes
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from muster.checkpoints.manifest import ARITHMETIC, Manifest

Array: TypeAlias = NDArray[Any]

ANY_BITS: Final = "any"
"""Digest of a rank of a job with `bits: any`, whose members need not compute the same bits."""

_UNKNOWN: Final = "unknown"

_GEMM_SHAPES: Final = ((8, 64, 10), (17, 33, 5), (32, 784, 256))
"""(rows, inner, columns). BLAS splits the last one among its threads."""

_DOT_LENGTH: Final = 20_011
_UFUNC_LENGTH: Final = 1003
"""Odd, so that the remainder loops after the SIMD loops are covered."""

_UFUNCS: Final = (np.exp, np.log1p, np.tanh, np.sin)

_PERIOD: Final = 4099
"""Values repeat after this many, to be made quickly; a prime, so that no two rows are equal."""

_REMEDIES: Final = {
    "the processor": "only processors of one kind can share a job",
    "numpy": "install the same version on both sides",
    "the BLAS library": "install the same wheel of numpy on both sides",
    "the BLAS kernel": "set OPENBLAS_CORETYPE to the older of the two on both sides",
    "the number of BLAS threads": (
        "set OPENBLAS_NUM_THREADS=1 on both sides, before numpy is imported"
    ),
    "numpy's SIMD level": "set NPY_DISABLE_CPU_FEATURES to the features that only one side has",
    "torch": "install the same version on both sides",
    "torch's kernels": "set ATEN_CPU_CAPABILITY to the older of the two on both sides",
    "the number of torch's threads": "set OMP_NUM_THREADS=1 on both sides",
    "torch's deterministic algorithms": "call torch.use_deterministic_algorithms on both sides",
    "the data set": "give the same samples in the same order on all ranks",
}
"""What to do about each fact that differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Equal digests mean equal bits, as far as the tested operations show."""

    digest: str
    facts: Mapping[str, str]
    """Settings that usually explain a difference; ``unknown`` where one cannot be read."""
    arithmetic: str = ""
    """Digest without the model and the data: what a checkpoint holds."""

    @property
    def value(self) -> dict[str, Any]:
        """What a checkpoint says about the process that has saved it."""
        return {"digest": self.arithmetic, "facts": dict(self.facts)}

    def difference(self, manifest: Manifest) -> str:
        """Return why a checkpoint has other bits than this process; "" if it is not known to."""
        found = manifest.values.get(ARITHMETIC)
        if found is None or found["digest"] == self.arithmetic:
            return ""
        why = explain(self, Fingerprint(digest="", facts=found["facts"]))
        return f"the checkpoint of step {manifest.step} has other bits: {why}"


def fingerprint() -> Fingerprint:
    """Return the fingerprint of this process."""
    digest = xxhash.xxh3_128()
    with np.errstate(all="ignore"):  # denormal numbers are among the inputs
        for result in _results():
            digest.update(np.ascontiguousarray(result).data)
    found = digest.hexdigest()
    return Fingerprint(digest=found, facts=_facts(), arithmetic=found)


@cache
def known_arithmetic(torch_version: str) -> Fingerprint:
    """Return the facts alone: quick, for a process that is not promised the same bits."""
    facts = _facts() | ({"torch": torch_version} if torch_version else {})
    digest = xxhash.xxh3_128_hexdigest("\n".join(facts.values()).encode())
    return Fingerprint(digest=digest, facts=facts, arithmetic=digest)


def explain(ours: Fingerprint, theirs: Fingerprint) -> str:
    """Return a sentence that says why the fingerprints differ and what to set."""
    if ours.digest == theirs.digest:
        return "both compute the same bits"
    differences = [
        f"{name} is {here} here and {there} there: {remedy}"
        for name, remedy in _REMEDIES.items()
        if (here := ours.facts.get(name, _UNKNOWN)) != (there := theirs.facts.get(name, _UNKNOWN))
    ]
    return "this process does not compute the same bits as the job; " + (
        "; ".join(differences)
        or "versions and settings are the same, so the processors must differ: set "
        "OPENBLAS_CORETYPE and NPY_DISABLE_CPU_FEATURES to what both can do"
    )


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
        # Some libraries switch the processor to flush denormal numbers to zero.
        yield values * np.finfo(dtype).tiny


def _products(dtype: DTypeLike) -> Iterator[Array]:
    """Yield the products of a layer: forward, both backward ones, one row, a dot product."""
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
    """Return pseudo-random numbers in [-0.5, 0.5), made from integers: the same everywhere."""
    words = np.arange(1, _PERIOD + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    values = (words >> np.uint64(40)).astype(np.float64) * 2.0**-24 - 0.5
    return np.resize(values.astype(dtype), count)


def numpy_build() -> tuple[str, str, tuple[str, ...]]:
    """Return numpy's version, the kernel of its BLAS, and the CPU features that it dispatches on.

    Those of its baseline are not among them: they cannot be disabled.
    """
    built: Any = np.show_config(mode="dicts")
    found = tuple(built["SIMD Extensions"].get("found", ()))
    return np.__version__, _ask(_openblas(), "corename", ctypes.c_char_p), found


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
    """Return numpy's own OpenBLAS, which is already loaded, or None if it is not found."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in lines if "openblas" in line}
    # Another package, such as scipy, may have loaded its own copy.
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
