"""The demo, completed and interrupted."""

from pathlib import Path

from cli.errors import ExitCode
from cli.services.record import read_record
from muster.contracts.paths import DataDir
from tests.support.screens import Screen


def test_interrupted_demo_ends_its_services_and_cleans_up(tmp_path: Path) -> None:
    with Screen("demo", environment={"MUSTER_DATA_DIR": str(tmp_path)}, directory=tmp_path) as demo:
        demo.see(r'3\. Job "alone"')
        demo.type("\x03")
        demo.see("muster: interrupted; ranks checkpoint, and the services end")
        assert demo.end() == ExitCode.INTERRUPTED
    assert read_record(DataDir(tmp_path / "demo")) is None
