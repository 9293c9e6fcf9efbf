"""Scripts with `muster.torch` as people write them: the same bits, or refused in one sentence.

``python -m stress.torch_scripts [SEED] [--only NAME,NAME] [--kills 7]`` trains each script
alone; then with 2, 3 and 4 ranks, and in the sizes 2, 4, 1 and 3 one after another, while ranks are
killed at random moments; and once more alone, with a kill from which the job has to resume.

A script whose body is a function of state and batch must end with the same bits each time. Another
one, which hides something that it is not a function of, may do that as well, or be refused: what it
must not do is to complete with other bits.
"""

import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from muster.contracts.job.status import Reason
from stress.runner import Report, chance, main, say
from stress.torch_schedules import DEADLINE_SECONDS, End, printed_digests, ranks_output
from stress.torch_scripts import impure, pure
from stress.torch_scripts.frame import STEPS, Script, scripts_of
from tests.support.installation import Installation, is_over
from tests.support.pools import PooledJob

PLACE = Path(__file__).parent

SIZES = ((2,), (3,), (4,), (2, 4, 1, 3))
"""Of each job that is disturbed, one after another."""

KILLS = 7
ALONE, KILLED_ALONE = "1 rank", "1 rank, killed"
STEP_SECONDS = 0.12
"""While ranks are killed."""

LAST_MOMENT = 0.75
"""The share of the steps in which something happens."""


@dataclass
class Trial:
    """One job of a script, and what happens to it at random moments."""

    installation: Installation
    script: type[Script]
    draw: random.Random
    done: Counter[str] = field(default_factory=Counter)
    has_resumed: bool = False
    """Whether all of its ranks were dead at once."""

    def run(self, sizes: Sequence[int] = (1,), kills: int = 0) -> End | str:
        """Return how it ended, or why it was refused."""
        self.installation.deadline_seconds = DEADLINE_SECONDS
        is_calm = len(sizes) == 1 and not kills
        self._job = PooledJob(
            self.installation,
            pace_seconds=0 if is_calm else STEP_SECONDS / 8 * max(sizes),
            env={"PYTHONPATH": str(PLACE.parents[1])},
            program=None,
            command=[sys.executable, "-W", "ignore", str(PLACE / "train.py"), self.script.__name__],
            virtual_shards=8,
            batch_size=None,
            epochs=1,  # as many as the script says
            checkpoint_every=5,
            world_size=sizes[0],
            max_workers=max(sizes),
            spare_ranks=0 if is_calm else 1,
        )
        events: list[tuple[float, int | None]] = [
            (LAST_MOMENT * STEPS * place / len(sizes), size)
            for place, size in enumerate(sizes)
            if place
        ]
        events += [(self.draw.uniform(1, LAST_MOMENT * STEPS), None) for _ in range(kills)]
        size = sizes[0]
        for step, new in sorted(events, key=lambda it: it[0]):
            self._job.wait_until(
                lambda step=step: self._job.is_over() or self._job.see()["step"] >= step
            )
            if self._job.is_over():
                break
            time.sleep(self.draw.uniform(0, STEP_SECONDS))
            if new is None:
                self._kill(size)
            else:
                size = new
                self._job.scales(size)
        self._job.hurries()
        return self._end()

    def _kill(self, size: int) -> None:
        """Kill a rank that trains; half of the time wait until another one does in its place."""
        workers = self._job.wait_until(lambda: self._job.active() or self._job.is_over())
        with suppress(AttributeError, KeyError, ProcessLookupError):  # it has ended meanwhile
            self._job.signals(self.draw.choice(sorted(workers)))
            self.done["kills"] += 1
        if self.draw.random() < 0.5:
            self._job.wait_until(lambda: len(self._job.active()) == size or self._job.is_over())

    def _end(self) -> End | str:
        seen = self.installation.wait_until(self._job.job_id, is_over)
        self.has_resumed = "goes on from the checkpoint" in ranks_output(self._job)
        if seen["status"] == "FAILED" and seen["reason"] == Reason.INVALID_PROGRAM:
            return str(seen["message"])
        return End(self._job.completes(), printed_digests(self._job))


def faults_of(installation: Installation, script: type[Script], seed: int, kills: int) -> list[str]:
    """Train one script in all ways; return what must not be."""
    began_at, done = time.monotonic(), Counter[str]()
    draw = chance((script.__name__, seed))
    histories = {", ".join(map(str, it)) + " ranks": [it, 0] for it in SIZES}
    for name in draw.choices(sorted(histories), k=max(0, kills - 1)):
        histories[name][1] += 1
    ends: dict[str, End | str] = {}
    resumed: set[str] = set()
    for name, (sizes, count) in {ALONE: [(1,), 0], **histories, KILLED_ALONE: [(1,), 1]}.items():
        trial = Trial(installation, script, draw)
        try:
            ends[name] = trial.run(sizes, min(count, kills))
        except AssertionError as error:
            return [f"{script.__name__}, {name}, after {dict(trial.done)}: {error}"]
        done += trial.done
        resumed |= {name} if trial.has_resumed else set()
        if isinstance(ends[ALONE], str) and len(ends) > 1:
            break  # each of its processes is refused
    is_pure = script.__module__ == pure.__name__
    refusals = {name: it for name, it in ends.items() if isinstance(it, str)}
    others = [it for it in ends if it not in refusals and ends[it] != ends[ALONE]]
    is_open = {it: script.found_by_resume and it in resumed for it in others}
    found = [
        f"{script.__name__}, {it}: {ends[it]}, not {ends[ALONE]}"
        for it in others
        if not is_open[it]
    ]
    if is_pure:
        found += [f"{script.__name__}, {name}: refused: {why}" for name, why in refusals.items()]
    words = [f"other bits with {it}{' (left open)' * is_open[it]}" for it in others]
    words += [f"refused with {it}: {why}" for it, why in list(refusals.items())[:1]]
    seconds = f"{time.monotonic() - began_at:5.1f} s  {done['kills']} kills"
    say(f"{script.__name__:16} {seconds}  {'; '.join(words) or ends[ALONE]}")
    return found


def run(directory: Path, seed: int = 0, *, only: str = "", kills: int = KILLS) -> Report:
    """Train all scripts, or those that are named."""
    report = Report()
    with Installation(directory) as installation:
        for kind, scripts in (("pure", scripts_of(pure)), ("impure", scripts_of(impure))):
            wanted = [it for it in scripts if not only or it.__name__ in only.split(",")]
            found = [faults_of(installation, it, seed, kills) for it in wanted]
            good = sum(not it for it in found)
            report.lines.append(f"{good} of {len(found)} {kind} scripts are as they should be")
            report.faults += [fault for faults in found for fault in faults]
    return report


if __name__ == "__main__":
    main(run)
