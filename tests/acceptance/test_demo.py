"""The demonstration, and a person who has seen enough of it."""

from pathlib import Path

from screens import Screen

from cli.exit_codes import ExitCode
from cli.office import holder_of
from muster.contracts.layout import DataDirectory


def test_who_ends_the_demo_is_told_for_what_it_waits_and_nothing_is_left(tmp_path: Path) -> None:
    with Screen("demo", environment={"MUSTER_DATA_DIR": str(tmp_path)}, directory=tmp_path) as demo:
        demo.see(r'3\. Job "alone"')
        demo.type("\x03")
        demo.see("muster: interrupted; ranks save, and the services of the demo end")
        assert demo.end() == ExitCode.INTERRUPTED
    assert holder_of(DataDirectory(tmp_path / "demo")) is None
