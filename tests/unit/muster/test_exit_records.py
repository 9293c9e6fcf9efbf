import math
from pathlib import Path

import msgspec
from stories import beat

from muster.contracts.exit_record import ExitRecord
from muster.contracts.layout import JobFiles
from muster.contracts.messages import RankExited, RankSaid
from muster.contracts.process import ProcessRecord
from muster.exit_records import read_exit_record, write_exit_record

PROCESS = ProcessRecord(pid=7, start_ticks=1, boot_id="b", node="n")
ANOTHER = ProcessRecord(pid=8, start_ticks=1, boot_id="b", node="n")


def test_how_a_process_ended_is_on_disk_once_and_nothing_else_is(tmp_path: Path) -> None:
    files = JobFiles(tmp_path)
    files.exits.mkdir(parents=True)
    exited = RankExited(rank=1, incarnation=2, exit_code=None, signal=9, last_lines=())
    # Numbers are a program's own, and may be none.
    said = RankSaid(rank=1, incarnation=2, message=beat(metrics={"accuracy": math.inf}))
    record = ExitRecord(pid=7, at="2026-03-01T12:00:00+00:00", said=(said,), exited=exited)
    write_exit_record(files, record)
    write_exit_record(files, msgspec.structs.replace(record, at="later"))
    assert read_exit_record(files, 1, 2, PROCESS) == record
    assert read_exit_record(files, 1, 2, None) == record, "the name of the file must do"
    assert read_exit_record(files, 1, 3, PROCESS) is None
    assert read_exit_record(files, 1, 2, ANOTHER) is None
    assert list(files.exits.iterdir()) == [files.exit_record(1, 2)]
