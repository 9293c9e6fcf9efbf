from dataclasses import replace

import numpy as np
import pytest

from muster.runtime.fingerprint import Fingerprint, explain, fingerprint

FACTS = {
    "the processor": "x86_64",
    "numpy": "2.4.6",
    "the BLAS library": "scipy-openblas 0.3.31",
    "the BLAS kernel": "Haswell",
    "the number of BLAS threads": "1",
    "numpy's SIMD level": "X86_V2 X86_V3",
}
THEIRS = Fingerprint(digest="theirs", facts=FACTS)


def ours(**changes: str) -> Fingerprint:
    return Fingerprint(digest="ours", facts={**FACTS, **changes})


def test_every_fact_has_a_remedy() -> None:
    found = fingerprint()
    assert found.facts.keys() == FACTS.keys()
    assert found.facts["numpy"] == np.__version__
    assert all(found.facts.values())


def test_fingerprint_is_repeatable() -> None:
    first = fingerprint()
    with np.errstate(all="raise"):
        assert fingerprint() == first


def test_equal_digests_are_enough() -> None:
    faster = replace(ours(**{"the BLAS kernel": "SkylakeX"}), digest="theirs")
    assert explain(faster, THEIRS) == "both compute the same bits"


@pytest.mark.parametrize(
    ("fact", "value", "remedy"),
    [
        ("the number of BLAS threads", "4", "set OPENBLAS_NUM_THREADS=1 on both sides"),
        ("the BLAS kernel", "SkylakeX", "set OPENBLAS_CORETYPE"),
        ("numpy's SIMD level", "X86_V2", "set NPY_DISABLE_CPU_FEATURES"),
        ("numpy", "2.3.0", "install the same version"),
        ("the BLAS library", "mkl 2024", "install the same wheel of numpy"),
        ("the processor", "aarch64", "only processors of one kind can share a job"),
    ],
)
def test_difference_is_explained_with_a_remedy(fact: str, value: str, remedy: str) -> None:
    sentence = explain(ours(**{fact: value}), THEIRS)
    assert sentence.startswith("this process does not compute the same bits as the job; ")
    assert f"{fact} is {value} here and {FACTS[fact]} there: {remedy}" in sentence


def test_equal_settings_blame_the_processors() -> None:
    assert "so the processors must differ: set OPENBLAS_CORETYPE and" in explain(ours(), THEIRS)


def test_all_differences_are_listed() -> None:
    other = ours(**{"numpy": "2.3.0", "the number of BLAS threads": "4"})
    sentence = explain(other, THEIRS)
    assert "on both sides; the number of BLAS threads is 4" in sentence
