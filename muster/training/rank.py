"""Runs the managed training of one rank: program, data, peers and checkpoints, wired together.

A rank is a fork of the prefork server, or ``python -P -m muster.training.rank``.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np

from muster.contracts.job.spec import JobSpec
from muster.contracts.settings.environ import RankSettings
from muster.contracts.settings.names import PROCESS_TAG
from muster.datasets.errors import DatasetEmpty
from muster.datasets.random_access import RandomAccess
from muster.host.containment import contain_self, set_tag_limit
from muster.host.trace import stamp
from muster.program import InvalidProgram, Program, State
from muster.runtime.agent_client import AgentClient, AgentSocket
from muster.runtime.exit_report import ExitReport, exit_process, print_error, print_interrupt
from muster.runtime.fingerprint import fingerprint
from muster.runtime.storage_client import open_data
from muster.training import independent
from muster.training.blocks import BlockComputer, BusyFlag
from muster.training.classifier import Classifier
from muster.training.groups.state_sync import Replica
from muster.training.loader import load_program, report_program_errors
from muster.training.reporter import Reporter
from muster.training.schedule import Schedule
from muster.training.start import keep_freed_memory, ready_trainer, wait_for_order


def run() -> NoReturn:
    """Become the rank, or the spare process, that the environment describes."""
    settings = RankSettings.read(os.environ, world_size=JobSpec().world_size)
    if settings.is_spare:
        set_tag_limit(os.environ[PROCESS_TAG], is_final=False)
    elif PROCESS_TAG in os.environ:  # not when started by hand
        contain_self(os.environ[PROCESS_TAG])
    train(settings)


def train(settings: RankSettings) -> NoReturn:
    """Train as the settings say, and end the process."""
    stamp("rank began")
    agent = AgentClient(AgentSocket.of(settings))
    report = ExitReport(settings, agent)
    code = 1
    try:
        if settings.mode == "synchronous":
            code = train_synchronous(report, Path.cwd(), agent)
        else:
            code = independent.main(settings, agent)
    except KeyboardInterrupt as error:
        # Ctrl-C reaches only a rank that was started by hand; under an agent it is an error.
        code = print_interrupt() if settings.agent_fd is None else print_error(error)
    except BaseException as error:  # noqa: BLE001  reported, then the process ends
        code = print_error(error)
    finally:
        exit_process(code, report)


def train_synchronous(report: ExitReport, working_dir: Path, agent: AgentClient) -> int:
    """Train with the members of each group, to the end or until asked to stop."""
    settings, busy = report.settings, BusyFlag()
    was_spare = settings.is_spare
    reporter = Reporter(settings, agent, busy)
    if not was_spare:
        reporter.supervision.start()
    source = open_data(settings, reporter.supervision.warn)
    program: Program
    with busy:
        if settings.program is None:
            program = Classifier(source)
        else:
            program = load_program(settings.program, working_dir, dataset_dir=settings.dataset_dir)
    drawer = RandomAccess(source)
    if drawer.totals.lines == 0:
        raise DatasetEmpty(source.location, "its shards hold no line")
    schedule = Schedule(
        totals=drawer.totals,
        batch_size=settings.batch_size,
        virtual_shards=settings.virtual_shards,
        epochs=settings.epochs,
        seed=settings.seed,
        checkpoint_every=settings.checkpoint_every,
    )
    with busy, report_program_errors("initial() of the program failed", working_dir):
        initial = program.initial(settings.seed)
    computer = BlockComputer(program, schedule, drawer, initial, busy)
    replica, arithmetic = Replica(initial), fingerprint()
    keep_freed_memory()  # not what the preparation has freed
    if was_spare:
        _take_trial_step(computer, initial, replica)
        wait_for_order(agent)
        settings = RankSettings.read(os.environ, world_size=JobSpec().world_size)
        report.settings = settings
        reporter = Reporter(settings, agent, busy)
        reporter.supervision.start()
    reporter.set_schedule(initial, schedule)
    _refuse_closed(agent.socket)
    trainer = ready_trainer(settings, agent, reporter, computer, replica, arithmetic)
    if was_spare:  # only now: the group is decided meanwhile
        contain_self(os.environ[PROCESS_TAG])
    with _refusing_closed(agent.socket):
        outcome = computer.run(trainer.train())
    reporter.end(outcome)
    reporter.supervision.report_exit()  # before the exit handlers of the program
    return 0


def _take_trial_step(computer: BlockComputer, initial: State, replica: Replica) -> None:
    """Update memory that is not used yet; the computer has tried a leaf. The first time is slow."""
    ones = np.ones(computer.schema.elements, np.float32)
    means = computer.schema.means(ones, np.empty_like(ones))
    computer.update(initial, means.gradients, 0, replica.other)


@contextmanager
def _refusing_closed(agent_socket: AgentSocket) -> Iterator[None]:
    """Raise `InvalidProgram` for errors that follow from a program that closed our descriptors."""
    try:
        yield
    except OSError:
        _refuse_closed(agent_socket)
        raise


def _refuse_closed(agent_socket: AgentSocket) -> None:
    if agent_socket.is_closed:
        raise InvalidProgram(
            "the program has closed files and sockets that Muster needs: let it close only what it "
            "has opened itself (look for os.closerange and os.close), and submit the job again"
        )


if __name__ == "__main__":
    run()
