from muster.links.reconnect import Reconnect


def test_a_problem_is_said_once_until_another_one_comes() -> None:
    said: list[str] = []
    attempts = Reconnect(0.0, say=said.append)
    for number in attempts:
        if number == 6:
            break
        error = OSError("refused" if number < 4 else "reset")
        attempts.failed(error, f"no way, try {number}: ")
    assert said == ["no way, try 0: refused", "no way, try 4: reset"]
    assert str(attempts.error) == "reset"


def test_attempts_end_at_their_limit_unless_the_other_end_was_reached() -> None:
    attempts = Reconnect(0.0, limit_seconds=0.0)
    assert list(attempts) == [0], "one is made in any case"
    count = 0
    for count in attempts:
        attempts.limit_seconds = 3600.0 if count < 3 else 0.0
        attempts.restart()
    assert count == 3
