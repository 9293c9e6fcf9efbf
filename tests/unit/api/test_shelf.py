"""What feeds keep is bounded, and it is not the quiet ones who pay for it."""

import pytest

from api import shelf
from api.shelf import Event, Kept, Shelf


def fill(kept: Kept, count: int, size_bytes: int = 10) -> None:
    for number in range(count):
        kept.append(Event(f"{number:0{size_bytes}}".encode(), {}))


def numbers(kept: Kept) -> list[int]:
    return [int(kept[place].wire) for place in range(len(kept))]


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "KEPT_EVENTS", 5)
    monkeypatch.setattr(shelf, "KEPT_BYTES", 120)


def test_one_feed_keeps_its_last_events() -> None:
    kept = Shelf().kept()
    fill(kept, 7)
    assert numbers(kept) == [2, 3, 4, 5, 6]
    assert kept[-1].wire == b"0000000006"
    assert kept.size_bytes == 50


def test_together_they_keep_no_more_than_the_limit_whatever_is_written() -> None:
    whole = Shelf()
    feeds = [whole.kept() for _ in range(40)]
    for feed in feeds:
        fill(feed, 5)
        assert sum(one.size_bytes for one in feeds) <= 120
    fill(feeds[0], 1, size_bytes=1000)
    assert sum(one.size_bytes for one in feeds) <= 120


def test_a_position_takes_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "PLACE_BYTES", 15)
    whole = Shelf()
    small, large = whole.kept(), whole.kept()
    fill(small, 2)
    for number in range(5):
        large.append(Event(f"{number:010}".encode(), dict.fromkeys(range(2), (0, number))))
        assert small.size_bytes + large.size_bytes <= 120
    assert (numbers(small), numbers(large)) == ([0, 1], [3, 4])


def test_who_holds_most_gives_up_its_oldest() -> None:
    whole = Shelf()
    quiet, loud = whole.kept(), whole.kept()
    fill(quiet, 2)
    fill(loud, 5, size_bytes=25)
    assert numbers(quiet) == [0, 1]
    assert numbers(loud) == [4]


def test_who_is_gone_leaves_its_room_to_the_others() -> None:
    whole = Shelf()
    gone, other = whole.kept(), whole.kept()
    fill(gone, 5, size_bytes=20)
    gone.close()
    fill(other, 5, size_bytes=24)
    assert len(other) == 5
