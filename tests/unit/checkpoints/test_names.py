import pytest

from muster.checkpoints.names import (
    CheckpointName,
    generation_of_temporary,
    latest_line,
    parse_latest,
    temporary_latest,
)

NAMES = {
    "step_0000000042.g0003": CheckpointName(3, 42),
    "step_0000000042.g0003.r0001": CheckpointName(3, 42, 1),
    "step_0000000000.g0000": CheckpointName(0, 0),
    "step_12345678901.g12345": CheckpointName(12345, 12345678901),
}

NO_NAMES = [
    "",
    "step_42.g3",
    "step_0000000042",
    "step_0000000042.g0003 ",
    "step_0000000042.g0003\n",
    "step_0000000042.g0003.r0000",
    "step_00000000042.g0003",
    "step_-000000042.g0003",
    "step_000000004\u0662.g0003",
    "../step_0000000042.g0003",
    "step_0000000042.g0003/..",
    ".step_0000000042.g0003.tmp",
]


@pytest.mark.parametrize(("text", "name"), NAMES.items())
def test_a_name_is_written_as_it_is_read(text: str, name: CheckpointName) -> None:
    assert str(name) == text
    assert CheckpointName.parse(text) == name
    assert parse_latest(latest_line(name)) == name


@pytest.mark.parametrize("text", NO_NAMES)
def test_what_is_not_exactly_a_name_is_none(text: str) -> None:
    assert CheckpointName.parse(text) is None


def test_names_sort_by_generation_then_step_then_revision() -> None:
    ordered = [
        CheckpointName(0, 9),
        CheckpointName(1, 1),
        CheckpointName(1, 2),
        CheckpointName(1, 2, 1),
        CheckpointName(2, 0),
    ]
    assert sorted({*ordered}) == ordered


def test_temporary_names_say_who_left_them() -> None:
    assert generation_of_temporary(CheckpointName(7, 1).temporary) == 7
    assert generation_of_temporary(CheckpointName(7, 1, 2).temporary) == 7
    assert generation_of_temporary(temporary_latest(12)) == 12
    for stranger in ("LATEST", ".LATEST.tmp", "step_0000000001.g0007.tmp", ".x.g0001.tmp"):
        assert generation_of_temporary(stranger) is None
