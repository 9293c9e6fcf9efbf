"""Two Ctrl-C that come together may be one; a person who meant two is told to press again."""

from cli.second_interrupt import SecondInterrupt


def test_what_may_be_an_echo_hurries_nobody_and_is_told() -> None:
    said: list[str] = []
    second = SecondInterrupt(lambda: said.append("insisted"), said.append)
    second.hear()
    second.hear()
    assert not said
    second.end_echo()
    (told,) = said
    assert told.endswith("Ctrl-C once more to not wait for them")
    second.hear()
    assert said == [told, "insisted"]


def test_where_nothing_came_in_the_time_of_echoes_nothing_is_said() -> None:
    said: list[str] = []
    second = SecondInterrupt(lambda: said.append("insisted"), said.append)
    second.end_echo()
    assert not said
    second.hear()
    assert said == ["insisted"]
