"""Events as a browser reads them."""

from api.sse import beginning, encoded


def test_lines_are_an_event_without_a_name() -> None:
    assert encoded("6f1c2ab9/0.0:8", "one\n\ntwo") == (
        b"id: 6f1c2ab9/0.0:8\ndata: one\ndata: \ndata: two\n\n"
    )


def test_what_is_no_lines_has_a_name() -> None:
    assert encoded("6f1c2ab9/0.0:8", "{}", "end") == (
        b"id: 6f1c2ab9/0.0:8\nevent: end\ndata: {}\n\n"
    )


def test_the_first_event_says_only_where_it_begins_and_when_to_come_back() -> None:
    assert beginning("6f1c2ab9/0.0:0") == b"id: 6f1c2ab9/0.0:0\nretry: 2000\n\n"
