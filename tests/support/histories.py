"""Histories of a job as text, with what the coordinator decides after each line.

A file holds histories, separated by blank lines; each begins with ``# what it shows``::

    # a stop asks the ranks to save, then kills them
    running world_size=2
    is_stopped grace=30           -> terminate 0 1, STOPPING (stopped_by_user)
    exits 0
    passes 30                     -> kill 1 (stopped_by_user)
    dies 1                        -> STOPPED (stopped_by_user), dismiss agent
    ? restarts                    -> 0 0

The first line is a constructor of `Story`; any other one has methods of `Story`, separated by
semicolons, after which the plan is carried out. After the arrow stand the actions, none without an
arrow. ``~`` before a line leaves them unchecked. ``?`` reads a value of the job or of each rank. A
group is shown as its round and ``worker@rank`` of each member, a pause as a paused group.

``python -m tests.support.histories FILE ...`` writes what happens into the files.
"""

import re
import sys
from collections.abc import Iterator
from enum import Enum
from itertools import groupby
from pathlib import Path
from types import NoneType

from coordinator.decide import actions
from coordinator.decide.actions import Action
from coordinator.decide.state.rank import RankSnapshot
from muster.checkpoints.manifest import RestorePoint
from muster.contracts.agent import LOCAL_HOST
from muster.contracts.job.status import Reason, StopRequest
from muster.contracts.rank import Phase
from tests.support.stories import Story
from tests.support.successors import successor

ARROW_COLUMN = 48
OF_LOCAL_AGENT = {"agent": "state", "agent_number": "agent_number", "agent_failures": "failures"}
OF_RANK = {
    "attempt": "attempt.number",
    "joined_round": "attempt.member.joined_round",
    "kill.message": "attempt.intent.kill.message",
    "throughput_steps_per_sec": "attempt.throughput.steps_per_sec",
}


class History:
    """One history, as it is written."""

    def __init__(self, title: str, lines: list[str]) -> None:
        self.title = title
        self.lines = lines
        self._story: Story

    def replay(self) -> list[str]:
        """Return the lines with what has happened."""
        return [self._replay(line) for line in self.lines]

    def _replay(self, line: str) -> str:
        told = line.partition("->")[0].rstrip()
        outcome = self._value(told[1:].strip()) if told.startswith("?") else self._plan(told)
        if not outcome or told.startswith("~"):
            return told
        return f"{told:<{ARROW_COLUMN - 1}} -> {outcome}"

    def _plan(self, told: str) -> str:
        done: list[Action] = []
        for step in told.removeprefix("~").split(";"):
            verb, *words = step.split()
            if not hasattr(self, "_story"):
                self._story = getattr(Story, verb)(**_arguments(words)[1])
                continue
            if verb.startswith("taken_over"):
                self._take_over(verb, *_arguments(words)[0])
                continue
            positional, named = _arguments(words)
            result = getattr(self._story, verb)(*positional, **named)
            done += result if isinstance(result, list) else []
        return ", ".join(_shown([*done, *self._story.plans()]))

    def _take_over(self, verb: str, stop: StopRequest | None = None) -> None:
        agents = [LOCAL_HOST] if verb == "taken_over_with_agent" else []
        self._story = successor(self._story, agents=agents, stop=stop)

    def _value(self, path: str) -> str:
        job = self._story.job
        if path in OF_LOCAL_AGENT:
            return _read(job.agents[LOCAL_HOST], OF_LOCAL_AGENT[path])
        if path == "agents":
            return " ".join(f"{agent.host}:{agent.state.name}" for agent in job.agents.values())
        if path == "states":
            return " ".join(member.state for member in job.pool.members)
        if hasattr(job, path.split(".", maxsplit=1)[0]) and not path.startswith("ranks."):
            return _read(job, path)
        values = [_read_rank(rank, path.removeprefix("ranks.")) for rank in job.ranks]
        return (" | " if any(" " in value for value in values) else " ").join(values)


def histories(path: Path) -> Iterator[History]:
    """Yield the histories of a file."""
    for block in path.read_text().strip().split("\n\n"):
        title, *lines = block.splitlines()
        yield History(title.removeprefix("# "), lines)


def rewrite(path: Path) -> None:
    """Write what happens in each history into its file."""
    blocks = ["\n".join([f"# {one.title}", *one.replay()]) for one in histories(path)]
    path.write_text("\n\n".join(blocks) + "\n")


def _arguments(words: list[str]) -> tuple[list[object], dict[str, object]]:
    positional = [_parsed(word) for word in words if "=" not in word]
    pairs = (word.split("=", 1) for word in words if "=" in word)
    return positional, {name: _parsed(value) for name, value in pairs}


def _parsed(word: str) -> object:
    if "," in word:
        return tuple(_parsed(part) for part in word.split(",") if part)
    if re.fullmatch(r"-?\d+", word):
        return int(word)
    if re.fullmatch(r"-?\d*\.\d+", word):
        return float(word)
    values: dict[str, object] = {"yes": True, "no": False, "none": None}
    for kind in (StopRequest, Reason, Phase):
        values |= {member.name: member for member in kind}
    return values.get(word, word.replace("_", " "))


def _shown(done: list[Action]) -> Iterator[str]:
    for verb, words in groupby(map(_words, done), key=lambda words: words[0]):
        yield " ".join([verb, *(word for word in (word for _, word in words) if word)])


def _words(action: Action) -> tuple[str, str]:  # noqa: PLR0911  one return for each kind
    """Return a verb, and its object if there is one."""
    match action:
        case actions.SetStatus(status=status, reason=reason):
            return status, f"({reason})" if reason else ""
        case actions.KillProcess(rank=rank, cause=cause):
            return "kill", f"{rank} ({cause.reason})"
        case actions.PublishGroup(group=group):
            members = zip(group.workers, group.ranks, strict=True)
            pairs = " ".join(f"{worker}@{rank}" for worker, rank in members)
            kind = "pause" if group.paused else "group"
            return f"{'save in ' if group.save else ''}{kind} {group.round}:", pairs
        case actions.ListCheckpoints():
            return "list checkpoints", ""
        case actions.StartAgent() | actions.KillAgent() | actions.DismissAgent():
            verb = type(action).__name__.removesuffix("Agent").lower()
            return f"{verb} agent", "" if action.host == LOCAL_HOST else action.host
        case actions.LoseHost():
            return "lose host", action.host
        case actions.DrainLogs():
            return "drain logs", action.host
        case actions.PlaceRank():
            return "place", f"{action.rank}@{action.host}"
        case _:
            return re.sub("(Rank)?$", "", type(action).__name__).lower(), str(action.rank)


def _read_rank(rank: RankSnapshot, path: str) -> str:
    """Return a value of a rank, of its attempt or of its retry budget."""
    path = OF_RANK.get(path, path)
    owners = (rank, rank.attempt, rank.budget)
    return _read(next(it for it in owners if hasattr(it, path.split(".", maxsplit=1)[0])), path)


def _read(value: object, path: str) -> str:
    for name in path.split("."):
        value = getattr(value, name, None)
    match value:
        case RestorePoint():
            return str(value)
        case bool() | NoneType():
            return {True: "yes", False: "no", None: "-"}[value]
        case Enum():
            return value.name
        case tuple() | frozenset():
            return ",".join(map(str, value)) or "-"
        case dict():
            return ",".join(f"{kind.name}:{count}" for kind, count in value.items()) or "-"
        case _:
            return str(value).replace("\n", " ")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        rewrite(Path(name))
