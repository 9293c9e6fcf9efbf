"""Processes that are set up differently compute different bits, and say so."""

import json
import os
import signal
import subprocess
import sys

import pytest

from muster.runtime.fingerprint import Fingerprint, explain

PINNED = {"OPENBLAS_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Haswell"}
BEYOND_SSE = (
    "X86_V3 X86_V4 AVX512_ICL AVX512_SPR "  # as numpy 2.4 and newer calls them
    "FMA3 AVX2 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL"
)
PROGRAM = """
import json
from dataclasses import asdict
from muster.runtime.fingerprint import fingerprint
print(json.dumps(asdict(fingerprint())))
"""


def fingerprint_with(**changes: str) -> Fingerprint:
    """Return the fingerprint of a process of its own with these settings."""
    unpinned = {name: value for name, value in os.environ.items() if name not in PINNED}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**unpinned, **PINNED, **changes},
        capture_output=True,
        check=True,
        timeout=60,
    )
    return Fingerprint(**json.loads(done.stdout))


@pytest.fixture(scope="module")
def pinned() -> Fingerprint:
    try:
        found = fingerprint_with()
    except subprocess.CalledProcessError as error:
        if error.returncode != -signal.SIGSEGV:
            raise
        pytest.skip("numpy's BLAS crashes with these settings, as that of numpy 2.5 does")
    if found.facts["the BLAS kernel"] != "Haswell":
        pytest.skip("numpy's BLAS is no OpenBLAS, or this processor is no Haswell or newer")
    return found


def test_the_same_settings_are_the_same_bits_in_another_process(pinned: Fingerprint) -> None:
    assert fingerprint_with() == pinned


@pytest.mark.parametrize(
    ("name", "value", "fact"),
    [
        ("OPENBLAS_NUM_THREADS", "2", "the number of BLAS threads"),
        ("OPENBLAS_CORETYPE", "Sandybridge", "the BLAS kernel"),
        ("OPENBLAS_CORETYPE", "Nehalem", "the BLAS kernel"),
        ("NPY_DISABLE_CPU_FEATURES", BEYOND_SSE, "numpy's SIMD level"),
    ],
)
def test_another_setting_is_other_bits_and_is_named(
    pinned: Fingerprint, name: str, value: str, fact: str
) -> None:
    other = fingerprint_with(**{name: value})
    if other.facts == pinned.facts:
        pytest.skip(f"{name} makes no difference on this machine")
    assert other.digest != pinned.digest
    assert f"{fact} is {other.facts[fact]} here and {pinned.facts[fact]} there: set {name}" in (
        explain(other, pinned)
    )
