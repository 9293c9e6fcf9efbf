import os

import pytest
from enclosures import enclosed

from muster.brand import brand_of, brands, can_brand
from muster.cells import cells_of_job, clear_cell

UID = "5f" * 16
branding = pytest.mark.skipif(not can_brand(), reason="somebody has limited the limit")


def test_the_brands_of_a_job_hold_its_ranks_and_these_their_incarnations() -> None:
    (brand,) = brands(f"{UID}/3/7")
    assert brand in brands(f"{UID}/3")
    assert brand in brands(f"{UID}/")
    assert brand not in brands(f"{UID}/4/")
    assert brand not in brands(f"{UID[1:]}/")
    assert brand not in brands(f"{UID}/3/8")


@pytest.mark.parametrize("place", ["0/0", "4095/1023", "4096/1024"])
def test_every_brand_is_a_number_that_the_kernel_keeps(place: str) -> None:
    (brand,) = brands(f"{UID}/{place}")
    assert 1 << 62 <= brand < 1 << 63
    assert brand in brands(UID)


@pytest.mark.parametrize("place", ["agent", "template", "0/0/0"])
def test_who_is_no_rank_has_no_brand(place: str) -> None:
    assert not brands(f"{UID}/{place}")


@branding
@pytest.mark.parametrize(
    "then",
    [
        "",
        "enclose(sys.argv[1].replace('7', '9'))",
        "import resource; resource.setrlimit(10, (resource.getrlimit(10)[1],) * 2)",
    ],
    ids=["left alone", "branded anew", "limits raised"],
)
def test_a_brand_outlives_environment_session_and_program(then: str) -> None:
    with enclosed(f"{UID}/3/7", then=then) as process:
        assert brand_of(process.pid) in brands(f"{UID}/3/7")
    for cell in cells_of_job(UID):
        clear_cell(cell)


def test_who_is_gone_and_who_is_a_stranger_wear_none() -> None:
    assert brand_of(2**22 + 1) == 0
    assert brand_of(os.getpid()) not in brands(UID)
