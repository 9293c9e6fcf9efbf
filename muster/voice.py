"""How a rank is heard: what it says to its agent, and the thread that beats.

Training never waits for supervision. A message is sent whole or, if nobody empties the socket,
not at all; the next beat says everything again. An agent that takes over hears everything that
still holds from the beginning. Without an agent there is nobody to tell.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Final

from muster.contracts.encoding import encode
from muster.contracts.messages import SAVED_LIMIT, Beat, RankMessage, Saved
from muster.line import Line

NEWS_SECONDS: Final = 0.2
"""A step is told at once if the last one was told at least this long ago."""

ROOM_PATIENCE_SECONDS: Final = 1.0
"""How long something that will not be said again waits for an agent that is behind."""

STOP_LOOK_SECONDS: Final = 0.5
"""How often a heart between two beats looks whether it is to stop."""

LAST_WORD_SECONDS: Final = 5.0
"""How long a process that ends waits for an agent that takes over: then its end is seen."""

CALL_PAUSE_SECONDS: Final = 0.05
"""Between two calls for an agent. Its end is seen at once, and the next one needs a moment."""


class Voice:
    """Sends messages to the agent; any thread may use it.

    What a rank says takes no lock: a signal may come in the middle of it, and so may a fork.
    """

    def __init__(self, line: Line) -> None:
        self.line: Final = line
        self._standing: dict[type[RankMessage], tuple[int, RankMessage]] = {}
        """The last message of each kind, and its place among all messages."""
        self._places = count()
        self._saved: deque[Saved] = deque(maxlen=SAVED_LIMIT)
        self._is_understood = True
        """Whether the present agent has heard what was said before it came."""
        self._finding = threading.Lock()

    def say(self, message: RankMessage) -> None:
        """Send a message; the next agent will hear it if this one does not."""
        packet = encode(message)
        if isinstance(message, Saved):
            self._saved.append(message)
        else:
            self._standing[type(message)] = (next(self._places), message)
        self.line.send(packet)

    def said(self) -> tuple[RankMessage, ...]:
        """Return everything that holds, as an agent that takes over would hear it."""
        standing = sorted(self._standing.values(), key=lambda placed: placed[0])
        return (*(message for _, message in standing), *self._saved)

    def say_patiently(self, message: RankMessage) -> None:
        """Send a message, and wait a moment for room if there is none."""
        self.line.await_room(ROOM_PATIENCE_SECONDS)
        self.say(message)

    @property
    def can_find_agent(self) -> bool:
        """Whether it is known where another agent would be."""
        return self.line.can_be_renewed

    def await_loss(self, seconds: float) -> None:
        """Wait that long, or until our agent is gone; if it is already, only a moment."""
        if self.line.is_broken:
            time.sleep(CALL_PAUSE_SECONDS)
        else:
            self.line.await_end(seconds)

    @property
    def is_replaced(self) -> bool:
        """Whether this process is nobody's any more: see `Line.is_succeeded`."""
        with self._finding:
            return self.line.is_succeeded

    def find_agent(self) -> bool:
        """Return whether an agent is there, after calling for another if ours is gone."""
        with self._finding:
            if self.line.is_broken:
                if not self.line.renew():
                    return False
                self._is_understood = False
            if not self._is_understood:
                self._is_understood = self._say_again()
            return True

    def _say_again(self) -> bool:
        """Say everything that holds, as it came; return whether there was room for all of it."""
        for kind in sorted(self._standing, key=lambda kind: self._standing[kind][0]):
            if not self.line.await_room(ROOM_PATIENCE_SECONDS):
                return False
            # Looked up late: the training thread may have a newer one by now.
            _, message = self._standing[kind]
            self.line.send(encode(message))
        for saved in list(self._saved):
            if not self.line.await_room(ROOM_PATIENCE_SECONDS):
                return False
            self.line.send(encode(saved))
        return True


class Heart:
    """Beats from its own thread, and from the training thread when there is news.

    The same thread finds the agent that takes over from one that has died.
    """

    def __init__(
        self,
        voice: Voice,
        state: Callable[[], Beat],
        *,
        heartbeat_seconds: float,
        orphan_timeout_seconds: float,
        on_orphaned: Callable[[], None],
        on_replaced: Callable[[], None],
    ) -> None:
        """`on_orphaned` is called, once, after that long without any agent.

        `on_replaced` is called when another process stands in this one's place, and ends it.
        """
        self._voice = voice
        self._state = state
        self._heartbeat_seconds = heartbeat_seconds
        self._orphan_timeout_seconds = orphan_timeout_seconds
        self._on_orphaned = on_orphaned
        self._on_replaced = on_replaced
        self._is_orphan = False
        self._stopped = threading.Event()
        self._next_news = 0.0

    def start(self) -> None:
        threading.Thread(target=self._beat_forever, name="muster-heart", daemon=True).start()

    def stop(self) -> None:
        """Beat once more, with the last word on where the rank is, and no more."""
        self._stopped.set()
        if self._voice.is_replaced:  # so whatever it has come to does not count
            self._on_replaced()
        self._voice.say(self._state())
        if not self._is_orphan:
            self._await_agent()

    def news(self) -> None:
        """Tell the present state, unless it was told a moment ago."""
        now = time.monotonic()
        if now >= self._next_news:
            self._next_news = now + NEWS_SECONDS
            self._voice.say(self._state())

    def _beat_forever(self) -> None:
        seen = now = time.monotonic()
        next_beat = now + self._heartbeat_seconds
        while not self._stopped.is_set():
            self._voice.await_loss(max(0.0, min(next_beat - now, STOP_LOOK_SECONDS)))
            if self._stopped.is_set():
                return
            now = time.monotonic()
            if now >= next_beat:
                # First: what comes next looks at a directory, and that may be far away.
                next_beat = now + self._heartbeat_seconds
                self._voice.say(self._state())
            if self._voice.is_replaced:
                self._on_replaced()
            if self._voice.find_agent():
                seen = now
            elif now >= seen + self._orphan_timeout_seconds and not self._is_orphan:
                self._is_orphan = True
                self._on_orphaned()

    def _await_agent(self) -> None:
        """Let an agent that takes over hear the last word; it then sees the end as well."""
        until = time.monotonic() + LAST_WORD_SECONDS
        while self._voice.can_find_agent and not self._voice.find_agent():
            if time.monotonic() >= until:
                return
            time.sleep(CALL_PAUSE_SECONDS)
