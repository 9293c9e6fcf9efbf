"""How hosts that differ can compute the same bits."""

import pytest
from msgspec.structs import replace

from muster.contracts.host import HostFacts, common_environment
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
    found, why = common_environment({"a": first, "b": second})
    assert why == f"all use the kernels of {core}"
    assert [it["OPENBLAS_CORETYPE"] for it in found.values()] == [core, core]
    assert tuple(it["NPY_DISABLE_CPU_FEATURES"] for it in found.values()) == disabled


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (facts("Haswell"), ""),
        (facts("SkylakeX", V4, numpy="2.0.0"), "install the same numpy"),
        (facts("neoversev1", machine="aarch64"), "use bits any"),
        (facts("Bulldozer"), "use bits any"),
    ],
    ids=["equal", "another numpy", "another machine", "unknown kernel"],
)
def test_no_kernels_are_chosen_where_none_would_help(other: HostFacts, reason: str) -> None:
    chosen, why = common_environment({"a": facts("Haswell"), "b": other})
    assert chosen == {}
    assert reason in why
    assert bool(reason) is bool(why)
