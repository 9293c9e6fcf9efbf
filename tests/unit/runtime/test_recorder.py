"""What a rank reports between two heartbeats."""

from math import nan

from muster.contracts.series import Aggregate, Window
from muster.runtime.heartbeat import Recorder


def test_a_window_sums_up_all_values_until_it_is_sent() -> None:
    recorder = Recorder()
    for step, loss in enumerate([3.0, 9.0, nan, 1.0, 2.0], start=1):
        recorder.take(step, {"loss": loss})
    known = Aggregate(3.0, 1.0, 9.0, 2.0, 4, 1)
    assert recorder.window() == Window(0, 5, is_back=True, values={"loss": known})
    assert recorder.window() == Window(0, 5, is_back=True, values={"loss": known}), (
        "it was not sent"
    )
    recorder.clear()
    assert recorder.window() is None
    recorder.take(5, {"val": 7.0})
    assert recorder.window() == Window(
        5, 5, is_back=False, values={"val": Aggregate(7.0, 7.0, 7.0, 7.0, 1, 0)}
    )


def test_values_after_a_restore_begin_there() -> None:
    recorder = Recorder()
    recorder.go_to(40)
    assert recorder.window() is None
    recorder.take(41, {"loss": 1.0})
    window = recorder.window()
    assert window is not None
    assert (window.since, window.step, window.is_back) == (40, 41, True)


def test_a_step_back_begins_again() -> None:
    recorder = Recorder()
    recorder.take(1, {"loss": 1.0})
    recorder.window()
    recorder.clear()
    for step in (2, 3, 2):
        recorder.take(step, {"loss": float(step)})
    window = recorder.window()
    assert window is not None
    assert (window.since, window.step, window.is_back) == (1, 2, True)
    assert window.values["loss"].count == 1


def test_steps_without_values_are_told_as_well() -> None:
    recorder = Recorder()
    recorder.take(1, {})
    assert recorder.window() == Window(0, 1, is_back=True, values={})
