"""Whom `muster down` ends, and where it does not wait for ever to learn that."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cli import down
from cli.down import UnknownHolder, end_services
from cli.exit_codes import ExitCode, code_of_error
from cli.office import Holder, sole_office
from muster.contracts.layout import DataDirectory
from muster.patience import Patience
from muster.processes import myself

OF_ANOTHER_NAMESPACE = msgspec.json.encode(
    Holder(
        url="http://127.0.0.1:8000",
        process=replace(myself(), pid=1, start_ticks=0),
        log=None,
        is_ending=False,
    )
)
"""The lock of a container's process is seen; by its number there is somebody else here."""


@pytest.mark.parametrize(
    "record",
    [None, b'{"url": 7', OF_ANOTHER_NAMESPACE],
    ids=["removed", "damaged", "in a container"],
)
def test_a_holder_whose_record_leads_nowhere_is_not_awaited_for_ever(
    record: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(down, "BEGINNERS", Patience(seconds=0.0, pause_seconds=0.0))
    files = DataDirectory(tmp_path)
    with sole_office(files):
        if record is not None:
            files.keeper.write_bytes(record)
        with pytest.raises(UnknownHolder) as unknown:
            end_services(tmp_path)
    assert code_of_error(unknown.value) == ExitCode.FAILED
    assert str(unknown.value).startswith(f"a `muster up` holds {tmp_path}, and its record there, ")
    assert str(unknown.value).endswith("end that `muster up` where it runs")
