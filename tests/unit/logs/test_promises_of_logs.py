"""The promises of `LocalLogs`, also where blocks and batches are tiny."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from muster.contracts.settings.paths import JobFiles
from muster.logs import follower, log_file
from muster.logs.local import LocalLogs
from muster.logs.log_file import PIECE_BYTES
from muster.logs.source import GAP, LINE_LIMIT_BYTES, LogFilter, Position
from tests.support.logs import JobLogs, batches, is_always, is_never, rest_of

COUNT = 20


class Written(JobLogs):
    """The logs of a job, and a source that reads them."""

    def __init__(self, files: JobFiles) -> None:
        super().__init__(files)
        self.source = LocalLogs(files)

    def tail(self, wanted: LogFilter, count: int = 9) -> list[str]:
        return [line.text for line in self.source.tail(wanted, count).lines]


@pytest.fixture(params=["local", "local in tiny blocks"])
def logs(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Written:
    if "tiny" in request.param:
        monkeypatch.setattr(follower, "BATCH_BYTES", 30)
        monkeypatch.setattr(log_file, "BLOCK_BYTES", 10)
    return Written(JobFiles(tmp_path))


def by_rank(found: Sequence[str]) -> list[list[str]]:
    return [[line for line in found if line.startswith(f"{rank} ")] for rank in (0, 1)]


def test_every_position_resumes_with_exactly_the_rest(logs: Written) -> None:
    for rank, attempt in [(0, 0), (0, 1), (1, 0), (1, 3)]:
        text = "".join(f"{attempt}-{number}\n" for number in range(COUNT))
        logs.write(rank, text + "unfinished", attempt=attempt)
    found = batches(logs.source.follow(None, {}))
    everything = [line for lines, _ in found for line in lines]
    assert len(everything) == 4 * (COUNT + 1)
    seen: list[str] = []
    for lines, position in found:
        seen += lines
        rest = rest_of(logs.source.follow(None, position))
        assert by_rank(seen + rest) == by_rank(everything)
    for first in range(0, len(found), 5):
        for last in range(first, len(found), 7):
            reader = logs.source.follow(None, found[first][1], found[last][1])
            expected = [line for lines, _ in found[first + 1 : last + 1] for line in lines]
            assert by_rank(rest_of(reader)) == by_rank(expected)
            assert not reader.is_ahead


@pytest.mark.parametrize(("place", "until"), [((0, 4), (0, 2)), ((1, 2), (0, 6))])
def test_a_reader_ahead_of_its_limit_gets_nothing(
    logs: Written, place: tuple[int, int], until: tuple[int, int]
) -> None:
    logs.write(0, "0\n1\n2\n")
    logs.write(0, "3\n", attempt=1)
    reader = logs.source.follow(None, {0: place}, {0: until})
    assert reader.is_ahead
    assert rest_of(reader) == []
    assert reader.position == {0: place}


def test_a_fast_rank_does_not_hold_up_another(logs: Written) -> None:
    for rank in (0, 1):
        logs.write(rank, "long line\n" * (1 << 14))
    first = logs.source.follow(None, {}).next_batch(is_always)
    assert {lines.name.rank for lines in first if lines.raw} == {0, 1}


def test_lines_of_several_ranks_are_merged_by_time(logs: Written) -> None:
    for time, rank in enumerate((0, 1, 1, 0), 1):
        logs.write(rank, f"{time}\n", at_micros=time)
    assert rest_of(logs.source.follow(None, {})) == ["0 1", "1 2", "1 3", "0 4"]
    assert logs.tail(LogFilter(), 3) == ["2", "3", "4"]


def test_an_unfinished_line_waits_until_its_log_is_over(logs: Written) -> None:
    logs.write(0, "begin")
    reader = logs.source.follow(None, {})
    assert rest_of(reader, is_never) == []
    assert logs.tail(LogFilter()) == ["begin"]
    logs.write(0, "ning\nnext")
    assert rest_of(reader, is_never) == ["0 beginning"]
    logs.write(0, "", attempt=1)
    assert rest_of(reader, is_never) == ["0 next"]
    assert rest_of(reader, is_never) == []
    assert reader.position == {0: (0, 14)}


@pytest.mark.parametrize(("place", "before"), [((0, 999), [GAP.decode()]), ((7, 0), [])])
@pytest.mark.parametrize("until", [None, {0: (0, 4)}])
def test_a_place_that_does_not_exist_means_the_beginning(
    logs: Written, place: tuple[int, int], before: list[str], until: Position | None
) -> None:
    logs.write(0, "new\n")
    reader = logs.source.follow(0, {0: place}, until)
    assert not reader.is_ahead
    assert rest_of(reader) == [f"0 {line}" for line in (*before, "new")]


def test_a_job_without_logs_has_no_lines(logs: Written) -> None:
    assert rest_of(logs.source.follow(None, {})) == logs.tail(LogFilter()) == []
    assert logs.source.tail_position(None, 5) == {}


def test_a_long_line_is_shown_cut(logs: Written) -> None:
    line = "x" * (LINE_LIMIT_BYTES + 7)
    cut = "x" * LINE_LIMIT_BYTES + " … [7 bytes cut]"
    logs.write(0, f"first\n{line}\nnext\n")
    assert logs.tail(LogFilter()) == ["first", cut, "next"]
    assert rest_of(logs.source.follow(0, {})) == ["0 first", f"0 {cut}", "0 next"]
    assert line in [found.raw.decode() for found in logs.source.tail(LogFilter(), 9).lines]


@pytest.mark.parametrize("place", [0, LINE_LIMIT_BYTES, PIECE_BYTES - 4, 3 * PIECE_BYTES - 1])
@pytest.mark.parametrize("end", ["", "\n", "x\nlast\n"])
def test_text_is_found_anywhere_in_a_long_line(logs: Written, place: int, end: str) -> None:
    logs.write(0, f"first\n{'x' * place}Straße{'x' * (3 * PIECE_BYTES - place)}{end}")
    (found,) = logs.source.tail(LogFilter(text="Straße"), 5).lines
    assert found.start <= 6 + place < found.end
    assert logs.tail(LogFilter(text="Strasse")) == []


def test_until_includes_an_unfinished_line(logs: Written) -> None:
    logs.write(0, "one\nt", at_micros=100)
    logs.write(0, "wo", at_micros=200)
    assert logs.tail(LogFilter(until=100)) == ["one"]
    assert logs.tail(LogFilter(until=200)) == ["one", "two"]


def test_a_position_inside_a_line_starts_there(logs: Written) -> None:
    logs.write(0, "line 0\nline 1\n")
    assert logs.tail(LogFilter(after={0: (0, 3)})) == ["e 0", "line 1"]


def test_a_tail_position_is_followed_by_the_last_lines(logs: Written) -> None:
    logs.write(1, "a\nb\n", at_micros=1)
    logs.write(0, "c\nd\n", at_micros=2)
    logs.write(0, "e\nunfinished", attempt=1)
    for count in range(6):
        reader = logs.source.follow(None, logs.source.tail_position(None, count))
        last = ["1 a", "1 b", "0 c", "0 d", "0 e"][5 - count :]
        assert rest_of(reader) == [*last, "0 unfinished"]
