"""The trace of a request is in its problem and in what is logged for it."""

import pytest
from unit.api.test_handlers import answer_to

from api.tracing import trace_id

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADER = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (HEADER, TRACE),
        (f"{HEADER}-later", TRACE),
        ("", None),
        (HEADER.upper(), None),
        (HEADER[:-1], None),
        (f"ff{HEADER[2:]}", None),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
    ],
)
def test_a_trace_is_read_where_one_is_named(header: str, found: str | None) -> None:
    assert trace_id({"type": "http", "headers": [(b"traceparent", header.encode())]}) == found


def test_without_a_trace_a_problem_names_none() -> None:
    assert "trace_id" not in answer_to(RuntimeError("x")).json()
