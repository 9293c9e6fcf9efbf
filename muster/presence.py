"""How a rank is there for its agent: hello, beats, and a last word when an error of ours ends it.

Used by everything that trains; what a beat says is the caller's to know. SIGTERM is a request.
"""

import atexit
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

from muster.contracts.encoding import speakable
from muster.contracts.endings import REPLACED_CODE
from muster.contracts.environ import RankSettings
from muster.contracts.errors import MusterError
from muster.contracts.messages import Beat, Hello, Orphaned, RankMessage, Warned
from muster.program import ProgramRaised
from muster.redaction import Redaction
from muster.refusals import refusal_of
from muster.remarks import remark
from muster.voice import Heart, Voice


class Presence:
    """One process's side of being supervised. For the main thread."""

    def __init__(self, voice: Voice, settings: RankSettings, state: Callable[[bool], Beat]) -> None:
        """`state` makes a beat, given whether somebody has asked for an end."""
        self._voice = voice
        self._state = state
        self._heart = Heart(
            voice,
            self._beat,
            heartbeat_seconds=settings.heartbeat_seconds,
            orphan_timeout_seconds=settings.orphan_timeout_seconds,
            on_orphaned=self._on_orphaned,
            on_replaced=self._on_replaced,
        )
        self._orphan_timeout_seconds = settings.orphan_timeout_seconds
        self._stopping = False

    @property
    def is_stopping(self) -> bool:
        """Whether somebody asked for an end."""
        return self._stopping

    def start(self) -> None:
        """Say hello, begin to beat, and take over SIGTERM and errors of ours."""
        signal.signal(signal.SIGTERM, self._on_terminate)
        sys.excepthook = self._last_word
        self._voice.say(Hello())
        self._heart.start()
        atexit.register(self._heart.stop)

    def news(self) -> None:
        """Tell the present state, unless it was told a moment ago."""
        self._heart.news()

    def say(self, message: RankMessage) -> None:
        self._voice.say(message)

    def say_patiently(self, message: RankMessage) -> None:
        """Say what is better late than never."""
        self._voice.say_patiently(message)

    def warn(self, sentence: str) -> None:
        """Tell a person: in the log, and in the job's events."""
        self._voice.say(Warned(message=speakable(sentence)))
        remark(f"muster: warning: {sentence}")

    def _beat(self) -> Beat:
        return self._state(self._stopping)

    def _on_terminate(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True
        # At once: however the program ends from here on, its exit code 0 must not mean done.
        self._voice.say(self._beat())

    def _on_orphaned(self) -> None:
        # For an agent that comes after all: it was none of those who preempt.
        self._voice.say(Orphaned(by=f"itself (no agent for {self._orphan_timeout_seconds:g} s)"))
        # Whatever the program has made of that signal: it is what an agent would have sent.
        os.kill(os.getpid(), signal.SIGTERM)

    def _on_replaced(self) -> NoReturn:
        """End from whatever thread: the training thread may wait for a peer that is gone."""
        # If the agent that it has hears this, there was no other: it is nobody's crash.
        self._voice.say(Orphaned(by="itself (a newer agent's socket is there)"))
        remark(
            "muster: another agent has taken over this job while this machine stood still: this "
            "process has been replaced, and exits"
        )
        os._exit(REPLACED_CODE)

    def _last_word(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """An error of ours is a sentence; the agent hears of what a restart would only repeat."""
        if not isinstance(error, MusterError):
            sys.__excepthook__(kind, error, trace)
            return
        # First: a reader of the log may hold up who writes to it, or end us.
        refusal = refusal_of(error, Redaction.of_rank(os.environ))
        if refusal is not None:
            self._voice.say_patiently(refusal)
        if isinstance(error, ProgramRaised) and error.__cause__ is not None:
            cause = error.__cause__
            sys.__excepthook__(type(cause), cause, cause.__traceback__)
        remark(f"muster: {error}")
