"""Two Ctrl-C that come together may be one; a person who meant two is told to press again."""

from collections.abc import Callable

import pytest

from cli.second_interrupt import SecondInterrupt


class End:
    """An end that may be hurried, what it says, and a clock that is moved by hand."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._later: list[Callable[[], None]] = []
        self.second = SecondInterrupt(self._insist, self.said.append, self._call_later)

    def _insist(self) -> None:
        self.said.append("insisted")

    def _call_later(self, _: float, react: Callable[[], None]) -> None:
        self._later.append(react)

    def let_time_pass(self) -> None:
        (react,) = self._later
        react()


@pytest.fixture
def end() -> End:
    return End()


def test_what_may_be_an_echo_hurries_nobody_and_is_told(end: End) -> None:
    end.second.await_echoes()
    end.second.hear()
    end.second.hear()
    assert not end.said
    end.let_time_pass()
    (told,) = end.said
    assert told.endswith("Ctrl-C once more to not wait for them")
    end.second.hear()
    assert end.said == [told, "insisted"]


def test_where_nothing_came_in_the_time_of_echoes_nothing_is_said(end: End) -> None:
    end.second.await_echoes()
    end.let_time_pass()
    assert not end.said
    end.second.hear()
    assert end.said == ["insisted"]


def test_of_an_end_that_something_else_began_the_first_one_is_no_second(end: End) -> None:
    end.second.hear()
    (told,) = end.said
    assert told == "the ranks are saving already … (Ctrl-C again does not wait for them)"
    end.second.hear()  # its echo
    assert end.said == [told]
    end.let_time_pass()
    assert end.said[1].startswith("a second Ctrl-C so soon")
    end.second.hear()
    assert end.said[2:] == ["insisted"]


def test_nothing_is_said_of_what_is_over(end: End) -> None:
    end.second.await_echoes()
    end.second.hear()
    end.second.close()
    end.let_time_pass()
    assert not end.said
