import pytest

from cli.tables import cropped, narrowed, shortened, table


def test_columns_are_as_wide_as_they_have_to_be_and_numbers_stand_to_the_right() -> None:
    rows = [("höst", 7, None), ("b", 1234, None)]
    assert list(table(("node", "step", "pid"), rows)) == [
        "node  step  pid",
        "höst     7  -",
        "b     1234  -",
    ]


def test_a_table_without_rows_has_its_header() -> None:
    assert list(table(("a", "bb"), [])) == ["a  bb"]


def test_what_is_too_long_is_cut_and_says_so() -> None:
    assert [shortened(text, 4) for text in ("four", "fives", "", None)] == [
        "four",
        "fiv…",
        "",
        None,
    ]


@pytest.mark.parametrize(
    ("width", "said"), [(10, "abcdefghij"), (5, "ab…ij"), (4, "ab…j"), (1, "…")]
)
def test_an_id_is_cut_in_its_middle(width: int, said: str) -> None:
    assert cropped("abcdefghij", width) == said


@pytest.mark.parametrize(
    ("width", "left"),
    [(80, ("job", "a", "b")), (13, ("job", "a", "b")), (12, ("job", "a")), (1, ("job",))],
)
def test_a_narrow_table_keeps_what_it_cannot_do_without(width: int, left: tuple[str, ...]) -> None:
    header, rows = narrowed(("job", "a", "b"), [("long-id", 1, 2)], width, ["b", "a"])
    assert header == left
    assert rows[0][0] == "long-id"
    assert len(rows[0]) == len(left)
