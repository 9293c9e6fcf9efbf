"""`muster up -d` and `muster down`, without real services."""

from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest

import muster.client
from cli import services
from cli.service_record import ServiceRecord, service_lock
from cli.services import describe_ranks, end_services, start_detached
from muster.client import Client
from muster.contracts.errors import MusterError
from muster.contracts.paths import DataDir
from muster.contracts.settings import ServiceSettings
from muster.host.processes import this_process
from tests.support.summaries import RANK, SUMMARY

IN_A_CONTAINER = msgspec.json.encode(
    ServiceRecord(
        url="http://127.0.0.1:8000",
        process=replace(this_process(), pid=1, start_ticks=0),
        log=None,
        is_ending=False,
    )
)


@pytest.mark.parametrize(
    "record", [None, b'{"url": 7', IN_A_CONTAINER], ids=["missing", "damaged", "in a container"]
)
def test_down_gives_up_if_the_record_names_no_process(
    record: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "RECORD_SECONDS", 0.0)
    files = DataDir(tmp_path)
    with service_lock(files):
        if record is not None:
            files.keeper.write_bytes(record)
        with pytest.raises(MusterError, match=f"a `muster up` holds {tmp_path}"):
            end_services(files)


def test_down_without_services_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = DataDir(tmp_path / "none")
    end_services(files)
    assert f"nothing runs for {files.root}" in capsys.readouterr().err
    assert not files.root.exists()


def test_services_that_end_at_once_are_reported_with_their_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "command", lambda *_: ["/bin/sh", "-c", "echo no luck; exit 1"])
    monkeypatch.setattr(services, "LOG_LIMIT_BYTES", 10)
    files = DataDir(tmp_path)
    files.keeper_log.write_text("a long log of long ago\n")
    settings = ServiceSettings.read({"MUSTER_DATA_DIR": str(tmp_path)}, cores=1)
    with pytest.raises(MusterError, match=f"log is {files.keeper_log}:\nno luck$"):
        start_detached(settings, {})
    assert files.keeper_log.read_text() == "no luck\n"
    assert Path(f"{files.keeper_log}.1").read_text() == "a long log of long ago\n"


@pytest.mark.parametrize(
    ("living", "report"),
    [([0, 0], ""), ([1, 0], "1 rank of 1 job still runs"), ([1, 2], "3 ranks of 2 jobs still run")],
)
def test_running_ranks_are_counted(
    living: list[int], report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [{**SUMMARY, "workers": [{**RANK, "pid": 7}] * count} for count in living]
    answers = httpx.MockTransport(lambda _: httpx.Response(200, json={"jobs": jobs}))
    monkeypatch.setattr(
        muster.client, "Client", lambda url, **_: Client(url, transport=answers), raising=False
    )
    assert describe_ranks("http://api", None) == report
