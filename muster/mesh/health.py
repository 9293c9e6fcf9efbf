"""Which peers answer: probes, their time-outs, and what clears them. No I/O and no clock.

A failure is a probe that got no answer within its time-out. Anything that an authenticated peer
sends is an answer to every probe that is open. "Nothing heard for so long" is no failure: this
process may have been stopped itself, and then it has not listened.

A peer that dies right after an answer is lost after `every + timeout + (failures - 1) * every` at
the latest: 30 s by default, 4.5 s with the fast preset.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

LATENCY_WEIGHT: Final = 0.2
"""Of the newest answer in the moving average."""

LATE_SECONDS: Final = 1.0
"""A check that comes so much later than it was due: this process was stopped, not its peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """How soon a peer that does not answer is lost."""

    every_seconds: float
    timeout_seconds: float
    failures: int


PRESETS: Final[Mapping[str, Preset]] = {
    "default": Preset(every_seconds=5.0, timeout_seconds=15.0, failures=3),
    "fast": Preset(every_seconds=0.5, timeout_seconds=2.0, failures=5),
    "slow": Preset(every_seconds=10.0, timeout_seconds=30.0, failures=3),
}


@dataclass(slots=True)
class _Peer:
    due_at: float
    open: deque[float] = field(default_factory=deque)
    """When the probes without an answer were sent."""
    failures: int = 0
    latency_seconds: float | None = None


class Health:
    """The peers of one process. Read all sockets before `check`, or a woken process blames them."""

    def __init__(self, preset: Preset) -> None:
        self._preset = preset
        self._peers: dict[str, _Peer] = {}

    def add(self, peer: str, now: float) -> None:
        self._peers[peer] = _Peer(due_at=now + self._preset.every_seconds)

    def remove(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def answered(self, peer: str) -> None:
        """Take anything that an authenticated peer has sent as an answer."""
        if state := self._peers.get(peer):
            state.open.clear()
            state.failures = 0

    def measure(self, peer: str, seconds: float) -> None:
        """Take the time from a probe to its answer."""
        if state := self._peers.get(peer):
            before = seconds if state.latency_seconds is None else state.latency_seconds
            state.latency_seconds = before + LATENCY_WEIGHT * (seconds - before)

    def latencies_seconds(self) -> list[float]:
        """Return the moving averages of the peers that have answered a probe."""
        found = [state.latency_seconds for state in list(self._peers.values())]
        return [seconds for seconds in found if seconds is not None]

    def check(self, now: float) -> tuple[list[str], list[str]]:
        """Return who is to be probed now, and who is lost and no longer known here."""
        if now > self.wake_at() + LATE_SECONDS:
            self._shift(now)
        for state in self._peers.values():
            while state.open and now >= state.open[0] + self._preset.timeout_seconds:
                state.open.popleft()
                state.failures += 1
        lost = [
            peer for peer, state in self._peers.items() if state.failures >= self._preset.failures
        ]
        for peer in lost:
            del self._peers[peer]
        probed = [peer for peer, state in self._peers.items() if now >= state.due_at]
        for peer in probed:
            self._peers[peer].open.append(now)
            self._peers[peer].due_at = now + self._preset.every_seconds
        return probed, lost

    def wake_at(self) -> float:
        """When `check` is due; infinity without peers."""
        times = [state.due_at for state in self._peers.values()]
        times += [
            state.open[0] + self._preset.timeout_seconds
            for state in self._peers.values()
            if state.open
        ]
        return min(times, default=float("inf"))

    def _shift(self, now: float) -> None:
        """Judge no probe that was open while this process was stopped; probe all anew."""
        for state in self._peers.values():
            state.open.clear()
            state.due_at = now
