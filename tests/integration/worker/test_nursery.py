"""The lives of ranks in a nursery, as its agent and a coordinator see them."""

import errno
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from textwrap import indent

import msgspec
import pytest
from house import LAST_CALL, PATIENCE_SECONDS, SAY_HELLO, WAIT, House
from installation import await_value
from scarcity import no_descriptors
from stories import beat, saved

from muster.brand import can_brand, wear_brand
from muster.contracts.encoding import encode
from muster.contracts.environ import MARK
from muster.contracts.exit_record import ExitRecord, decode_exit_record
from muster.contracts.job import Reason
from muster.contracts.layout import JobFiles
from muster.contracts.messages import (
    Hello,
    RankExited,
    RankSaid,
    RankSpawned,
    Refused,
    TookUp,
    Warned,
)
from muster.exit_records import write_exit_record
from muster.processes import identify, is_running, marked
from worker.child import WARNINGS_LIMIT
from worker.starting import Started


def exit_of(
    rank: int, incarnation: int, code: int | None, number: int | None, *lines: str
) -> RankExited:
    return RankExited(
        rank=rank, incarnation=incarnation, exit_code=code, signal=number, last_lines=lines
    )


def test_a_life_is_reported_in_order_and_its_end_is_on_disk_first(house: House) -> None:
    # It lives until it was heard: who is gone before anybody could look has no start to report.
    calm = "import signal; signal.signal(signal.SIGTERM, lambda *_: os._exit(3)); "
    house.starts(calm + "print('the end', flush=True); " + SAY_HELLO + WAIT)
    house.lives_until(house.has_heard_hello)
    house.nursery.send(0, 0, signal.SIGTERM)
    house.lives_until_it_is_empty()
    spawned, said, exited = house.reports
    assert isinstance(spawned, RankSpawned)
    assert said == RankSaid(rank=0, incarnation=0, message=Hello())
    assert exited == exit_of(0, 0, 3, None, "the end")
    record = decode_exit_record(house.files.exit_record(0, 0).read_bytes(), spawned.pid)
    assert (record.said, record.exited) == ((said,), exited)
    assert house.files.times(0, 0).stat().st_size == 16


def test_of_several_that_have_ended_whoever_was_killed_is_told_of_first(house: House) -> None:
    house.starts("raise SystemExit(1)", rank=0)
    house.starts("import os; os.kill(os.getpid(), 9)", rank=1)
    house.starts("raise SystemExit(0)", rank=2)
    children = house.nursery.living
    await_value(lambda: all(child.has_exited() for child in children), str)
    house.lives_until_it_is_empty()
    ends = [report.rank for report in house.reports if isinstance(report, RankExited)]
    assert ends == [1, 0, 2]


def test_a_rank_is_told_where_to_write_down_its_error_and_that_is_read(house: House) -> None:
    house.files.run.mkdir(exist_ok=True)
    write = "import os; open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write"
    house.starts(f'{write}(\'{{"message": "ValueError: no"}}\'); raise SystemExit(1)')
    house.lives_until_it_is_empty()
    (end,) = (report for report in house.reports if isinstance(report, RankExited))
    assert end.error == "ValueError: no"


def test_an_end_is_on_disk_before_its_process_is_reaped(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that dies in between has left the record, and else a zombie that says how."""
    zombies: list[int] = []

    def look_and_write(files: JobFiles, record: ExitRecord) -> None:
        assert Path(f"/proc/{record.pid}").exists()
        zombies.append(record.pid)
        write_exit_record(files, record)

    monkeypatch.setattr("worker.ends.write_exit_record", look_and_write)
    house.starts("raise SystemExit(3)")
    house.lives_until_it_is_empty()
    assert house.reports[-1] == exit_of(0, 0, 3, None)
    (pid,) = zombies
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_a_signal_ends_exactly_the_incarnation_it_is_meant_for(house: House) -> None:
    house.starts(SAY_HELLO + WAIT, incarnation=4)
    house.lives_until(house.has_heard_hello)
    house.nursery.send(0, 3, signal.SIGKILL)
    house.nursery.send(1, 4, signal.SIGKILL)
    house.nursery.settle()
    assert house.nursery
    house.nursery.send(0, 4, signal.SIGTERM)
    house.lives_until_it_is_empty()
    assert house.reports[-1] == exit_of(0, 4, None, signal.SIGTERM)


def test_an_order_that_is_repeated_or_old_starts_nothing(house: House) -> None:
    house.starts(SAY_HELLO + WAIT, incarnation=1)
    house.lives_until(house.has_heard_hello)
    known = list(house.reports)
    house.starts("", incarnation=1)
    house.starts("", incarnation=2)
    assert house.reports == known, "it still lives"
    house.nursery.send(0, 1, signal.SIGKILL)
    house.lives_until_it_is_empty()
    known = list(house.reports)
    house.starts("", incarnation=0)
    house.starts("", incarnation=1)
    assert house.reports == known, "its incarnation has ended"
    house.starts("", incarnation=2)
    house.lives_until_it_is_empty()
    assert house.reports[-1] == exit_of(0, 2, 0, None)


def test_what_a_rank_leaves_behind_is_gone_before_its_end_is_reported(house: House) -> None:
    leave = (
        "import os, signal, time\n"
        "pid = os.fork()\n"
        "if pid == 0: signal.pause()\n"
        "print(pid, flush=True)\n"
        "os._exit(1)"
    )
    house.starts(leave)
    house.lives_until_it_is_empty()
    exited = house.reports[-1]
    assert isinstance(exited, RankExited)
    assert identify(int(exited.last_lines[0])) is None


def test_a_new_coordinator_is_told_who_lives_what_they_said_and_who_has_ended(
    house: House,
) -> None:
    house.starts("", rank=1)
    house.lives_until_it_is_empty()
    house.starts(SAY_HELLO + WAIT, rank=0)
    house.lives_until(house.has_heard_hello)
    spawned, said, ended = house.nursery.present_state()
    assert isinstance(spawned, RankSpawned)
    record = identify(spawned.pid)
    assert record is not None
    assert is_running(record)
    assert said == RankSaid(rank=0, incarnation=0, message=Hello())
    assert ended == exit_of(1, 0, 0, None)


def test_what_was_said_last_is_told_last(house: House) -> None:
    early, late = beat(step=3), beat(step=30)
    told = [Hello(), early, TookUp(generation=2, step=4), late]
    house.starts(f"import os; [os.write(CHANNEL, said) for said in {[*map(encode, told)]!r}]")
    house.lives_until_it_is_empty()
    *said, _ = house.nursery.present_state()
    assert [report.message for report in said] == [told[0], told[2], late]


def test_every_checkpoint_is_told_again_as_each_may_tell_of_other_passes(house: House) -> None:
    told = [saved(step) for step in (5, 10, 15)]
    house.starts(f"import os; [os.write(CHANNEL, said) for said in {[*map(encode, told)]!r}]")
    house.lives_until_it_is_empty()
    *said, _ = house.nursery.present_state()
    assert [report.message for report in said] == told


def test_only_so_many_warnings_of_a_process_become_events(house: House) -> None:
    warning = encode(Warned(message="again"))
    wait_for_room = "import os; os.set_blocking(CHANNEL, True); "
    house.starts(wait_for_room + f"[os.write(CHANNEL, {warning!r}) for _ in range(1000)]")
    house.lives_until_it_is_empty()
    warnings = [report for report in house.reports if isinstance(report, RankSaid)]
    assert len(warnings) == WARNINGS_LIMIT


@pytest.mark.parametrize("working_dir", ["/nowhere/at/all", "/dev/null"])
def test_what_cannot_be_started_is_refused_and_has_ended(house: House, working_dir: str) -> None:
    house.starts("", working_dir=working_dir)
    said, exited = house.reports
    assert isinstance(said, RankSaid)
    assert isinstance(said.message, Refused)
    assert said.message.reason is Reason.INVALID_PROGRAM
    assert working_dir in said.message.message
    assert exited == exit_of(0, 0, 126, None)
    assert list(house.nursery.present_state()) == [said, exited]
    assert not house.nursery


@pytest.mark.parametrize(
    "number", [errno.EAGAIN, errno.EMFILE, errno.ENOMEM, errno.ENOSPC, errno.EIO]
)
def test_what_the_host_has_no_room_for_has_ended_and_may_be_tried_again(
    house: House, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fails(*_: object) -> Started:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as scarcity:
        scarcity.setattr(house.starter, "start", fails)
        house.starts("")
    (ended,) = house.reports
    why = f"cannot be started in /: [Errno {number}] {os.strerror(number)}"
    assert ended == msgspec.structs.replace(exit_of(0, 0, None, None), unstarted=why)
    assert list(house.nursery.present_state()) == [ended]
    house.starts("", incarnation=1)
    house.lives_until_it_is_empty()
    assert house.reports[-1] == exit_of(0, 1, 0, None)


CALL = """
import socket
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect({address!r})
line.send({said!r})
line.recv(100)
"""


@pytest.mark.skipif(not can_brand(), reason="somebody has limited the limit")
@pytest.mark.parametrize(("wearer", "is_believed"), [(1, True), (0, False)])
def test_a_mark_speaks_for_its_rank_only_with_the_brand(
    house: House, wearer: int, *, is_believed: bool
) -> None:
    """A child of rank 0 that has copied the mark of rank 1 can neither refuse nor silence it."""
    for rank in (0, 1):
        house.starts(SAY_HELLO + WAIT, rank=rank)
    own = {child.rank: child.channel for child in house.nursery.living}
    house.nursery.answer_calls()
    words = CALL.format(
        address=str(house.nursery.newest_socket), said=encode(Warned(message="not me"))
    )
    caller = subprocess.Popen(
        [sys.executable, "-S", "-c", words],
        env={MARK: f"{house.uid}/1/0"},
        preexec_fn=partial(wear_brand, f"{house.uid}/{wearer}/0"),  # noqa: PLW1509  one thread
        stderr=subprocess.DEVNULL,
    )
    said = RankSaid(rank=1, incarnation=0, message=Warned(message="not me"))
    house.lives_until(lambda: said in house.reports or caller.poll() is not None)
    assert (said in house.reports) is is_believed
    child = house.nursery.find(1, 0)
    assert child is not None
    assert (child.channel is own[1]) is not is_believed
    caller.kill()
    caller.wait()


def test_all_of_them_can_be_asked_to_go(house: House) -> None:
    for rank in range(3):
        house.starts(WAIT, rank=rank)
    house.nursery.send_all(signal.SIGTERM)
    house.lives_until_it_is_empty()
    ends = [report for report in house.reports if isinstance(report, RankExited)]
    assert sorted(ends, key=lambda end: end.rank) == [
        exit_of(rank, 0, None, signal.SIGTERM) for rank in range(3)
    ]


def test_no_descriptor_is_left_open(house: House) -> None:
    house.starts("")
    house.lives_until_it_is_empty()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  names are enough
    for incarnation in range(1, 4):
        house.starts("", incarnation=incarnation)
        house.lives_until_it_is_empty()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208  names are enough


def test_an_end_waits_for_a_call_that_no_descriptor_was_there_for(house: House) -> None:
    house.nursery.answer_calls()
    address = str(house.nursery.newest_socket)
    last = Warned(message="the last word")
    house.starts(LAST_CALL.format(address=address, said=encode(last)))
    (child,) = house.nursery.living
    await_value(child.has_exited, lambda: "it does not end")
    spawned = list(house.reports)
    with no_descriptors():
        house.nursery.settle()
        assert house.reports == spawned
    house.lives_until_it_is_empty()
    *_, said, exited = house.reports
    assert said == RankSaid(rank=0, incarnation=0, message=last)
    assert isinstance(exited, RankExited)


IN_A_CHILD = """
import os, signal
if os.fork() == 0:
{call}
signal.pause()
"""


def test_a_call_of_a_ranks_child_waits_until_the_child_can_be_looked_at(house: House) -> None:
    house.nursery.answer_calls()
    said = Warned(message="by its child")
    call = CALL.format(address=str(house.nursery.newest_socket), said=encode(said))
    house.starts(IN_A_CHILD.format(call=indent(call, "    ")))
    (child,) = house.nursery.living
    own = child.channel
    ((key, _),) = house.selector.select(PATIENCE_SECONDS)
    with no_descriptors(but=1):
        key.data()
    assert child.channel is own
    house.lives_until(house.has_heard_hello)
    assert house.reports[-1] == RankSaid(rank=0, incarnation=0, message=said)


def test_a_log_that_cannot_be_opened_is_not_the_submissions_fault(house: House) -> None:
    house.files.logs.mkdir(parents=True)
    house.files.log(0, 0).symlink_to("/nowhere/at/all")
    house.starts("")
    (ended,) = house.reports
    assert isinstance(ended, RankExited)
    assert (ended.exit_code, ended.signal) == (None, None)
    assert ended.unstarted is not None
    assert "rank_00000.000.log" in ended.unstarted


@pytest.mark.parametrize("spare", range(6))
def test_with_too_few_descriptors_nothing_counts_as_contained_that_is_not(
    house: House, spare: int
) -> None:
    house.starts("import os, time; os.fork() or (os.setsid(), time.sleep(600)); os._exit(0)")
    (child,) = house.nursery.living
    await_value(child.has_exited, lambda: "it does not end")
    spawned = list(house.reports)
    with no_descriptors(but=spare):
        house.nursery.settle()
    assert house.reports == spawned or marked(f"{house.uid}/") == []
    house.lives_until_it_is_empty()
    assert marked(f"{house.uid}/") == []


def test_an_end_is_not_told_while_the_agent_cannot_look_however_long_that_takes(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.starts("import os, time; os.fork() or (os.setsid(), time.sleep(600)); os._exit(3)")
    (child,) = house.nursery.living
    await_value(child.has_exited, lambda: "it does not end")
    spawned = list(house.reports)
    with monkeypatch.context() as hasty, no_descriptors():
        hasty.setattr("worker.delays.CONTAINMENT_SECONDS", 0.0)
        house.nursery.settle()
        house.nursery.settle()
        assert house.reports == spawned
    house.lives_until_it_is_empty()
    assert house.reports[-1] == exit_of(0, 0, 3, None)
    assert house.files.exit_record(0, 0).exists()
    assert marked(f"{house.uid}/") == []


def test_an_agent_that_stays_blind_tells_an_end_all_the_same(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.delays.BLIND_SECONDS", 0.0)
    monkeypatch.setattr("worker.delays.CONTAINMENT_SECONDS", 0.0)
    house.starts("raise SystemExit(3)")
    (child,) = house.nursery.living
    await_value(child.has_exited, lambda: "it does not end")
    with no_descriptors():
        house.nursery.settle()
    assert house.reports[-1] == exit_of(0, 0, 3, None)
    assert not house.nursery
