"""Where a text may be cut."""

import pytest

from muster.letters import whole_letters


@pytest.mark.parametrize(
    ("content", "whole"),
    [
        (b"", 0),
        (b"ab", 2),
        ("aé€😀".encode(), 10),
        (b"a\xc3", 1),
        (b"a\xe2\x82", 1),
        (b"a\xf0\x9f\x98", 1),
        (b"a\xff\xff", 3),
        (b"\x80\x80", 2),
        (b"\xc3\xc3", 1),
    ],
)
def test_a_letter_that_has_only_begun_is_left_for_later(content: bytes, whole: int) -> None:
    assert whole_letters(content) == whole
