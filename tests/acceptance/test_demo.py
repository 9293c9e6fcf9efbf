"""The demonstration, and a person who has seen enough of it."""

from pathlib import Path

from cli.errors import ExitCode
from cli.service_record import read_record
from muster.contracts.paths import DataDir
from tests.support.screens import Screen


def test_who_ends_the_demo_is_told_for_what_it_waits_and_nothing_is_left(tmp_path: Path) -> None:
    with Screen("demo", environment={"MUSTER_DATA_DIR": str(tmp_path)}, directory=tmp_path) as demo:
        demo.see(r'3\. Job "alone"')
        demo.type("\x03")
        demo.see("muster: interrupted; ranks checkpoint, and the services end")
        assert demo.end() == ExitCode.INTERRUPTED
    assert read_record(DataDir(tmp_path / "demo")) is None
