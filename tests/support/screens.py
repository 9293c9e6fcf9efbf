"""Commands on a terminal of 80 columns: what a user sees and types."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

COLUMNS, LINES = 80, 24
DEADLINE_SECONDS = 60.0
UNREAD_SECONDS = 5.0

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Screen:
    """One command, its output on a terminal of its own."""

    def __init__(self, *words: str, environment: Mapping[str, str], directory: Path) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cli", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=directory,
            env={**os.environ, "TERM": "xterm", **environment},
            # So that what is typed reaches it as from its own terminal.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509  no threads here
            start_new_session=True,
        )
        os.close(theirs)
        self.written = ""
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if not self._is_closed:
            os.close(self._ours)

    def see(self, pattern: str) -> str:
        """Wait until it has written what `pattern` matches, and return that."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (found := re.search(pattern, CONTROL.sub("", self.written))):
            assert time.monotonic() < deadline, f"never seen: {pattern}\n{self.written}"
            assert self._read(), f"it ended without: {pattern}\n{self.written}"
        return found[0]

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def modes(self) -> list[object]:
        """Return the terminal's settings, such as whether keys are shown."""
        return termios.tcgetattr(self._ours)

    def interrupt(self) -> int:
        """Type Ctrl-C until it ends by that; return its exit code.

        The very moment in which a question is written and not yet waited at receives none.
        """
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"not interrupted:\n{self.written}"
            self.type("\x03")
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(UNREAD_SECONDS)
        return self.end()

    def close(self) -> int:
        """Close the terminal, as a person closes a window; return the command's exit code."""
        os.close(self._ours)
        self._is_closed = True
        return self.process.wait(DEADLINE_SECONDS)

    def end(self) -> int:
        """Wait until it ends by itself; return its exit code."""
        while self._read():
            pass
        return self.process.wait(DEADLINE_SECONDS)

    def drawings(self) -> list[str]:
        """Return each line that was drawn, also those that others were drawn over."""
        return [line for line in re.split(r"[\r\n]+", CONTROL.sub("", self.written)) if line]

    def _read(self) -> bool:
        ready, _, _ = select.select([self._ours], [], [], DEADLINE_SECONDS)
        assert ready, f"silent:\n{self.written}"
        try:
            content = os.read(self._ours, 65536)
        except OSError:  # the terminal's other end is closed
            return False
        self.written += content.decode(errors="replace")
        return bool(content)
