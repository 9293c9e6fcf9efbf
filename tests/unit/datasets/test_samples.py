from pathlib import Path

import msgspec
import pytest

from muster.datasets.errors import InvalidSample
from muster.datasets.samples import LabelledSample, parse_sample

SHARD = Path("data/shard_00003.txt")
LABELLED = msgspec.json.Decoder(LabelledSample)


def test_a_sample_has_the_decoders_shape() -> None:
    line = b'{"x":[0,0.5],"y":3}\r'
    expected = LabelledSample(x=[0.0, 0.5], y=3)
    assert parse_sample(line, LABELLED, shard=SHARD, line_number=1) == expected
    assert parse_sample(b"[1]", msgspec.json.Decoder(), shard=SHARD, line_number=1) == [1]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"x":[1],"y":', "truncated"),
        (b'{"x":[1]}', "`y`"),
        (b'{"x":["a"],"y":1}', "Expected `float`, got `str`"),
        (b'{"x":[NaN],"y":1}', "malformed"),
        (b"[" * 100_000, "Expected `object`"),
        (b"no json", "malformed"),
    ],
)
def test_a_line_that_is_no_sample_is_named(line: bytes, problem: str) -> None:
    with pytest.raises(InvalidSample, match=problem) as caught:
        parse_sample(line, LABELLED, shard=SHARD, line_number=17)
    assert str(caught.value).startswith("data/shard_00003.txt:17: no sample")
    assert (caught.value.path, caught.value.line_number) == (SHARD, 17)


@pytest.mark.parametrize("line", [b"[" * 100_000, b'["\xff\xfe"]'])
def test_endless_nesting_and_text_that_is_no_utf8_are_refused_too(line: bytes) -> None:
    with pytest.raises(InvalidSample, match="no sample"):
        parse_sample(line, msgspec.json.Decoder(), shard=SHARD, line_number=1)


def test_no_more_than_eighty_characters_of_a_line_are_shown_and_none_drives_the_terminal() -> None:
    with pytest.raises(InvalidSample) as caught:
        parse_sample(b"\x1b[31m" + b"z" * 500, LABELLED, shard=SHARD, line_number=1)
    message = str(caught.value)
    assert "\x1b" not in message
    assert "z" * 70 in message
    assert "z" * 80 not in message
