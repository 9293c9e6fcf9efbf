"""How hosts that differ can compute the same bits."""

import pytest
from msgspec.structs import replace

from muster.contracts.host import HostFacts, common_kernels
from tests.support.database_samples import FACTS

V4 = ("X86_V3", "X86_V4")


def facts(kernel: str, simd: tuple[str, ...] = ("X86_V3",), **others: str) -> HostFacts:
    return replace(FACTS, blas_kernel=kernel, simd=simd, **others)


@pytest.mark.parametrize(
    ("first", "second", "core", "disabled"),
    [
        (facts("SkylakeX", V4), facts("Haswell"), "Haswell", ("X86_V4", "")),
        (facts("Zen"), facts("SkylakeX", V4), "Haswell", ("", "X86_V4")),
        (facts("Zen"), facts("Haswell"), "Haswell", ("", "")),
        (facts("SapphireRapids", V4), facts("Nehalem", ()), "Nehalem", ("X86_V3 X86_V4", "")),
        (facts("Haswell", V4), facts("Haswell"), "Haswell", ("X86_V4", "")),
    ],
)
def test_hosts_use_the_newest_kernels_that_all_have(
    first: HostFacts, second: HostFacts, core: str, disabled: tuple[str, str]
) -> None:
    found = common_kernels({"a": first, "b": second})
    assert [it["OPENBLAS_CORETYPE"] for it in found.values()] == [core, core]
    assert tuple(it["NPY_DISABLE_CPU_FEATURES"] for it in found.values()) == disabled


@pytest.mark.parametrize(
    "other",
    [
        facts("Haswell"),
        facts("SkylakeX", V4, numpy="2.0.0"),
        facts("neoversev1", machine="aarch64"),
        facts("Bulldozer"),
    ],
    ids=["equal", "another numpy", "another machine", "unknown kernel"],
)
def test_no_kernels_are_chosen_where_none_would_help(other: HostFacts) -> None:
    assert common_kernels({"a": facts("Haswell"), "b": other}) == {}
