"""Ranks from their start to the report of their exit."""

import errno
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest

from muster.contracts.interpreter import VERSION, release
from muster.contracts.job.status import Reason
from muster.contracts.messages.agent import (
    AgentMessage,
    RankDied,
    RankExited,
    RankSaid,
    RankSpawned,
)
from muster.contracts.messages.assignment import AdoptedRank
from muster.contracts.messages.rank import (
    Hello,
    JoinedGroup,
    LoopEnded,
    PermanentFailure,
    Ready,
    Warned,
)
from muster.contracts.messages.wire import ExitRecord, decode_exit_record, encode
from muster.contracts.settings.names import PROCESS_TAG
from muster.contracts.settings.paths import JobFiles
from muster.host.containment import can_tag, set_tag_limit
from muster.host.processes import identify
from muster.logs.local import LocalLogs
from muster.logs.source import GAP, LogFilter
from muster.runtime.exit_report import write_exit_record
from tests.support.installation import await_value
from tests.support.stories import beat, saved
from tests.support.table_loop import RECONNECT_AND_SEND, SAY_HELLO, WAIT, TableLoop
from worker.ranks.listener import PACKETS_LIMIT
from worker.ranks.rank import WARNINGS_LIMIT, RankProcess
from worker.ranks.ranks import LOGS_FULL, TRUNCATED


def exit_of(
    rank: int, attempt: int, code: int | None, number: int | None, *lines: str
) -> RankExited:
    return RankExited(rank=rank, attempt=attempt, exit_code=code, signal=number, last_lines=lines)


def test_start_messages_and_exit_are_reported_in_order(loop: TableLoop) -> None:
    # It runs until it was read: a start is not reported if the process is gone before that.
    calm = "import signal; signal.signal(signal.SIGTERM, lambda *_: os._exit(3)); "
    loop.start(calm + "print('the end', flush=True); " + SAY_HELLO + WAIT)
    loop.run_until(loop.has_received_hello)
    loop.ranks.send_signal(0, 0, signal.SIGTERM)
    loop.run_until_empty()
    spawned, said, exited = loop.reports
    assert isinstance(spawned, RankSpawned)
    assert said == RankSaid(rank=0, attempt=0, message=Hello())
    assert exited == exit_of(0, 0, 3, None, "the end")
    record = decode_exit_record(loop.files.exit_record(0, 0).read_bytes(), spawned.pid)
    assert (record.said, record.exited) == ((said,), exited)
    assert loop.files.times(0, 0).stat().st_size == 16


TRAINER_BELOW_A_WRAPPER = f"""
import os, signal
if os.fork() == 0:
    print(os.getpid(), flush=True)
    {SAY_HELLO}
    if os.fork() == 0:
        os.write(CHANNEL, {encode(beat(step=1))!r})
    signal.pause()
signal.pause()
"""


def test_the_process_that_said_hello_is_known(loop: TableLoop) -> None:
    loop.start(f"exec({TRAINER_BELOW_A_WRAPPER.strip()!r})")
    loop.run_until(lambda: len(loop.reports) > 2)
    (rank,) = loop.ranks.running
    pid = int(loop.files.log(0, 0).read_text())
    assert rank.pid != pid == rank.trainer_pid
    assert rank.trainer is not None
    assert rank.trainer.identity == identify(pid)
    assert not rank.trainer.has_exited()
    os.kill(pid, signal.SIGKILL)
    await_value(rank.trainer.has_exited, lambda: "it runs")


@pytest.mark.parametrize(
    ("said", "python", "theirs"),
    [
        ({}, "the job's own", "an older one (protocol 0)"),
        ({"version": VERSION, "python": "/p"}, "/p", f"{VERSION} (protocol 0)"),
        (
            {"version": VERSION, "protocol": 99, "new": [1]},
            "the job's own",
            f"{VERSION} (protocol 99)",
        ),
    ],
)
def test_the_hello_of_another_muster_is_a_refusal(
    loop: TableLoop, said: dict[str, object], python: str, theirs: str
) -> None:
    hello = msgspec.msgpack.encode({"is": "hello", **said})
    loop.start(f"import os; os.write(CHANNEL, {hello!r}); {WAIT}")
    loop.run_until(loop.has_received_hello)
    (message,) = (it.message for it in loop.reports if isinstance(it, RankSaid))
    loop.ranks.send_signal(0, 0, signal.SIGKILL)
    loop.run_until_empty()
    assert isinstance(message, PermanentFailure)
    assert message.message.startswith(
        f"`python` is {python}, whose muster is {theirs}, not {release()}:"
    )


def test_killed_ranks_are_reported_before_those_that_exited(loop: TableLoop) -> None:
    loop.start("raise SystemExit(1)", rank=0)
    loop.start("import os; os.kill(os.getpid(), 9)", rank=1)
    loop.start("raise SystemExit(0)", rank=2)
    ranks = loop.ranks.running
    await_value(lambda: all(rank.process.has_exited() for rank in ranks), str)
    loop.run_until_empty()
    ends = [report.rank for report in loop.reports if isinstance(report, RankExited)]
    assert ends == [1, 0, 2]


@pytest.mark.parametrize(("number", "is_death"), [(signal.SIGKILL, True), (signal.SIGTERM, False)])
def test_the_death_of_a_member_is_reported_first(
    loop: TableLoop, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, *, is_death: bool
) -> None:
    before: list[AgentMessage] = []

    def look_and_contain(_rank: RankProcess) -> bool:
        before.extend(loop.reports)
        return True

    monkeypatch.setattr(RankProcess, "contain", look_and_contain)
    leave = "import signal, os; signal.signal(15, lambda *_: os._exit(0)); "
    loop.start(f"{leave} os.write(CHANNEL, {encode(Ready(port=0))!r}); {WAIT}")
    loop.run_until(loop.has_received_hello)
    loop.ranks.send_signal(0, 0, number)
    loop.run_until_empty()
    assert (RankDied(rank=0, attempt=0) in before) is is_death
    assert isinstance(loop.reports[-1], RankExited)


def test_what_a_member_has_said_is_reported_before_its_death(loop: TableLoop) -> None:
    said = LoopEnded(exporter=0)
    last = f"lambda *_: (os.write(CHANNEL, {encode(said)!r}), os.kill(os.getpid(), 9))"
    ready = f"os.write(CHANNEL, {encode(Ready(port=0))!r})"
    loop.start(f"import signal, os; signal.signal(15, {last}); {ready}; {WAIT}")
    loop.run_until(loop.has_received_hello)
    (rank,) = loop.ranks.running
    loop.ranks.send_signal(0, 0, signal.SIGTERM)
    await_value(rank.process.has_exited, str)
    loop.ranks.report_deaths()
    assert loop.reports[-2:] == [
        RankSaid(rank=0, attempt=0, message=said),
        RankDied(rank=0, attempt=0),
    ]
    loop.run_until_empty()


def test_the_error_file_of_a_rank_is_reported(loop: TableLoop) -> None:
    loop.files.run.mkdir(exist_ok=True)
    write = "import os; open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write"
    loop.start(f'{write}(\'{{"message": "ValueError: no"}}\'); raise SystemExit(1)')
    loop.run_until_empty()
    (end,) = (report for report in loop.reports if isinstance(report, RankExited))
    assert end.error == "ValueError: no"


def test_the_time_of_an_error_is_reported(loop: TableLoop) -> None:
    fail = "import os; os.write(1, b'KeyError: 3\\n'); "
    loop.start(fail + SAY_HELLO + WAIT, rank=0)
    loop.run_until(loop.has_received_hello)
    loop.start(fail + "raise SystemExit(1)", rank=1)
    loop.run_until(lambda: len(loop.ranks.running) == 1)
    loop.ranks.send_signal(0, 0, signal.SIGTERM)
    loop.run_until_empty()
    later, first = (report for report in loop.reports if isinstance(report, RankExited))
    assert (later.rank, first.rank) == (1, 0)
    assert first.error_at < later.error_at


def test_a_program_that_truncates_its_log_causes_one_warning(loop: TableLoop) -> None:
    again = "os.system('echo first; echo second > /dev/stderr; echo third')"
    loop.start(f"import os, time; {again}; time.sleep(0.5); {again}")
    loop.run_until_empty()
    warned = [said.message for said in loop.reports if isinstance(said, RankSaid)]
    assert warned == [Warned(message=TRUNCATED)]
    found = LocalLogs(loop.files).tail(LogFilter(), 10)
    assert [line.raw.decode() for line in found.lines] == [GAP.decode(), "second", "third"]


def test_logs_that_reach_their_limit_lose_their_oldest_lines(
    loop: TableLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.ranks.ranks.LOGS_CHECK_SECONDS", 0.0)
    logs = [loop.files.log(0, attempt) for attempt in (0, 1)]
    write = "print(*range(1 << 17), sep='\\n', flush=True); "
    loop.start(write)
    loop.run_until_empty()
    loop.start(write + write + SAY_HELLO + WAIT, attempt=1)
    hello = RankSaid(rank=0, attempt=1, message=Hello())
    loop.run_until(lambda: hello in loop.reports)
    sizes = [log.stat().st_size for log in logs]
    loop.ranks.tick()
    ended, running = (512 * log.stat().st_blocks for log in logs)
    limit = 1 << 20  # as in `assignment`
    assert ended <= 8192
    assert 0.8 * limit < running < limit
    assert sizes == [log.stat().st_size for log in logs], "offsets stay valid"
    full = RankSaid(rank=0, attempt=1, message=Warned(message=LOGS_FULL))
    assert loop.reports.count(full) == 1
    batch = LocalLogs(loop.files).follow(0, {}).next_batch(lambda _: True)
    gap = GAP.decode()
    first, second, _, *rest = (line for lines in batch for line in lines.text.split("\n"))
    assert (first, second) == (gap, gap), "of either attempt"
    assert rest == [str(int(rest[0]) + number) for number in range(len(rest))]


def test_an_exit_is_recorded_before_its_process_is_reaped(
    loop: TableLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that dies in between leaves the record or the zombie."""
    zombies: list[int] = []

    def check_and_write(files: JobFiles, record: ExitRecord) -> None:
        assert Path(f"/proc/{record.pid}").exists()
        zombies.append(record.pid)
        write_exit_record(files, record)

    monkeypatch.setattr("worker.ranks.exits.write_exit_record", check_and_write)
    loop.start("raise SystemExit(3)")
    loop.run_until_empty()
    assert loop.reports[-1] == exit_of(0, 0, 3, None)
    (pid,) = zombies
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_a_signal_reaches_only_the_attempt_it_names(loop: TableLoop) -> None:
    loop.start(SAY_HELLO + WAIT, attempt=4)
    loop.run_until(loop.has_received_hello)
    loop.ranks.send_signal(0, 3, signal.SIGKILL)
    loop.ranks.send_signal(1, 4, signal.SIGKILL)
    loop.ranks.settle()
    assert loop.ranks
    loop.ranks.send_signal(0, 4, signal.SIGTERM)
    loop.run_until_empty()
    assert loop.reports[-1] == exit_of(0, 4, None, signal.SIGTERM)


def test_a_repeated_or_old_start_is_ignored(loop: TableLoop) -> None:
    loop.start(SAY_HELLO + WAIT, attempt=1)
    loop.run_until(loop.has_received_hello)
    known = list(loop.reports)
    loop.start("", attempt=1)
    loop.start("", attempt=2)
    assert loop.reports == known, "it still runs"
    loop.ranks.send_signal(0, 1, signal.SIGKILL)
    loop.run_until_empty()
    known = list(loop.reports)
    loop.start("", attempt=0)
    loop.start("", attempt=1)
    assert loop.reports == known, "its attempt has ended"
    loop.start("", attempt=2)
    loop.run_until_empty()
    assert loop.reports[-1] == exit_of(0, 2, 0, None)


def test_messages_are_repeated_in_their_order(loop: TableLoop) -> None:
    early, late = beat(step=3), beat(step=30)
    saves = [saved(step) for step in (5, 10)]
    told = [Hello(), early, saves[0], JoinedGroup(round=2, step=4), saves[1], late]
    loop.start(f"import os; [os.write(CHANNEL, said) for said in {[*map(encode, told)]!r}]")
    loop.run_until_empty()
    *said, _ = loop.ranks.state()
    assert [report.message for report in said] == [told[0], told[3], late, *saves]


def test_the_number_of_reported_warnings_is_limited(loop: TableLoop) -> None:
    warning = encode(Warned(message="again"))
    wait_for_room = "import os; os.set_blocking(CHANNEL, True); "
    loop.start(wait_for_room + f"[os.write(CHANNEL, {warning!r}) for _ in range(1000)]")
    loop.run_until_empty()
    warnings = [report for report in loop.reports if isinstance(report, RankSaid)]
    assert len(warnings) == WARNINGS_LIMIT


@pytest.mark.parametrize("working_dir", ["/nowhere/at/all", "/dev/null"])
def test_an_unusable_working_directory_is_refused(loop: TableLoop, working_dir: str) -> None:
    loop.start("", working_dir=working_dir)
    said, exited = loop.reports
    assert isinstance(said, RankSaid)
    assert isinstance(said.message, PermanentFailure)
    assert said.message.reason is Reason.INVALID_PROGRAM
    assert working_dir in said.message.message
    assert exited == exit_of(0, 0, 126, None)
    assert list(loop.ranks.state()) == [said, exited]
    assert not loop.ranks


@pytest.mark.parametrize(
    "number", [errno.EAGAIN, errno.EMFILE, errno.ENOMEM, errno.ENOSPC, errno.EIO]
)
def test_a_lack_of_resources_can_be_retried(
    loop: TableLoop, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fails(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as shortage:
        shortage.setattr(loop.starter, "start", fails)
        loop.start("")
    (ended,) = loop.reports
    why = f"cannot be started in /: [Errno {number}] {os.strerror(number)}"
    assert ended == msgspec.structs.replace(exit_of(0, 0, None, None), unstarted=why)
    assert list(loop.ranks.state()) == [ended]
    loop.start("", attempt=1)
    loop.run_until_empty()
    assert loop.reports[-1] == exit_of(0, 1, 0, None)


@pytest.mark.skipif(not can_tag(), reason="RLIMIT_LOCKS is limited")
@pytest.mark.parametrize(("tagged_rank", "is_believed"), [(1, True), (0, False)])
def test_a_reconnecting_process_needs_the_tag_number_too(
    loop: TableLoop, tagged_rank: int, *, is_believed: bool
) -> None:
    """A child of rank 0 with a copy of rank 1's environment cannot take its channel."""
    for rank in (0, 1):
        loop.start(SAY_HELLO + WAIT, rank=rank)
    own = {rank_process.rank: rank_process.channel for rank_process in loop.ranks.running}
    loop.ranks.listen()
    words = RECONNECT_AND_SEND.format(
        address=str(loop.ranks.newest_socket), said=encode(Warned(message="not me"))
    )
    caller = subprocess.Popen(
        # A zombie has no environment to identify it by: wait for the end of the connection.
        [sys.executable, "-S", "-c", words + "link.recv(1)"],
        env={PROCESS_TAG: f"{loop.uid}/1/0"},
        preexec_fn=partial(set_tag_limit, f"{loop.uid}/{tagged_rank}/0"),  # noqa: PLW1509  one thread
        stderr=subprocess.DEVNULL,
    )
    said = RankSaid(rank=1, attempt=0, message=Warned(message="not me"))
    loop.run_until(lambda: said in loop.reports if is_believed else caller.poll() is not None)
    assert (said in loop.reports) is is_believed
    rank_process = loop.ranks.find(1, 0)
    assert rank_process is not None
    assert (rank_process.channel is own[1]) is not is_believed
    caller.kill()
    caller.wait()


def test_an_exited_rank_leaves_no_descriptor_open(loop: TableLoop) -> None:
    loop.start("")
    loop.run_until_empty()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  names are enough
    for attempt in range(1, 4):
        loop.start("", attempt=attempt)
        loop.run_until_empty()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208  names are enough


def test_an_unusable_log_can_be_retried(loop: TableLoop) -> None:
    loop.files.logs.mkdir(parents=True)
    loop.files.log(0, 0).symlink_to("/nowhere/at/all")
    loop.start("")
    (ended,) = loop.reports
    assert isinstance(ended, RankExited)
    assert (ended.exit_code, ended.signal) == (None, None)
    assert ended.unstarted is not None
    assert "rank_00000.000.log" in ended.unstarted


def test_an_exit_is_reported_although_a_process_survives_sigkill(
    loop: TableLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.ranks.rank.kill_attempt", lambda _tag: False)
    loop.start("raise SystemExit(3)")
    (rank,) = loop.ranks.running
    await_value(rank.process.has_exited, lambda: "it does not exit")
    loop.ranks.settle()
    assert loop.ranks, "its containment is tried again"
    monkeypatch.setattr("worker.ranks.ranks.CONTAINMENT_SECONDS", 0.0)
    loop.ranks.settle()
    assert loop.reports[-1] == exit_of(0, 0, 3, None)


def test_an_adopted_rank_without_a_log_is_supervised(loop: TableLoop) -> None:
    loop.files.times(0, 0).mkdir(parents=True)
    tag = f"{loop.uid}/0/0"
    with subprocess.Popen(
        ["/bin/sleep", "600"], env={PROCESS_TAG: tag}, start_new_session=True
    ) as process:
        record = identify(process.pid)
        assert record is not None
        loop.ranks.adopt(AdoptedRank(rank=0, attempt=0, process=record, process_tag=tag))
        loop.ranks.signal_all(signal.SIGKILL)
        loop.run_until_empty()
    assert loop.reports[-1] == exit_of(0, 0, None, signal.SIGKILL)


def test_messages_of_an_exited_rank_are_reported_once(loop: TableLoop) -> None:
    loop.start(SAY_HELLO)
    (listening,) = loop.selector.get_map().values()
    loop.run_until_empty()
    before = list(loop.reports)
    listening.data()  # as the loop does if both were ready
    assert loop.reports == before


def test_a_program_may_write_garbage_into_its_channel(loop: TableLoop) -> None:
    rubbish = "import os; os.write(CHANNEL, b'\\x82\\xa2is\\xa6warned\\xa7message\\xa1\\xff'); "
    loop.start(rubbish + SAY_HELLO + "os.close(CHANNEL); " + WAIT)
    loop.run_until(loop.has_received_hello)
    loop.run_until(lambda: not loop.selector.get_map())
    assert loop.ranks, "closing the channel is not an exit"


def test_a_rank_that_floods_its_channel_does_not_silence_others(loop: TableLoop) -> None:
    flood = f"os.set_blocking(CHANNEL, True)\nwhile True: os.write(CHANNEL, {encode(beat())!r})"
    loop.start(f"import os; {flood}", rank=0)
    loop.start(SAY_HELLO + WAIT, rank=1)
    hello = RankSaid(rank=1, attempt=0, message=Hello())
    loop.run_until(lambda: hello in loop.reports)


def test_the_old_channel_is_read_to_its_end_before_the_new_one(loop: TableLoop) -> None:
    loop.ranks.listen()
    sent = [beat(step=step) for step in range(2 * PACKETS_LIMIT)]
    last = Warned(message="on another channel")
    call = RECONNECT_AND_SEND.format(address=str(loop.ranks.newest_socket), said=encode(last))
    loop.start(f"import os; [os.write(CHANNEL, s) for s in {[*map(encode, sent)]!r}]\n{call}")
    (rank_process,) = loop.ranks.running
    await_value(rank_process.process.has_exited, lambda: "it does not end")
    while loop.ranks:  # no further turn of the loop
        loop.ranks.settle()
    said = [report.message for report in loop.reports if isinstance(report, RankSaid)]
    assert said == [*sent, last]
    assert isinstance(loop.reports[-1], RankExited)
