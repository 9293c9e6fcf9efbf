from cli.tables import shortened, table


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
