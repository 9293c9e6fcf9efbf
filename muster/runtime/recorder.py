"""The values that a rank reports, summed up until a heartbeat has taken them along."""

from collections import deque
from collections.abc import Mapping

from muster.contracts.series import Window, aggregate, joined


class Recorder:
    """Takes values in the training thread; another thread may sum them up meanwhile.

    So there is no lock, which a signal handler might find taken: `deque` is thread-safe.
    """

    def __init__(self) -> None:
        self._taken: deque[tuple[int, Mapping[str, float] | None]] = deque()
        self._step: int | None = None  # of the last value that is summed up
        self._window: Window | None = None

    def take(self, step: int, values: Mapping[str, float]) -> None:
        """Take what was reported after a step; a step before the last one: training went back."""
        self._taken.append((step, values))

    def go_to(self, step: int) -> None:
        """Note that the next values are of the steps after this one."""
        self._taken.append((step, None))

    def window(self) -> Window | None:
        """Return what was taken since the last `clear`. Not for two threads at once."""
        since = self._step
        columns: dict[str, list[float]] = {}
        while self._taken:
            step, values = self._taken.popleft()
            if since is None or self._step is None or values is None or step < self._step:
                # What could not be sent before training went back is forgotten.
                since = step if values is None else max(step - 1, 0)
                columns, self._window = {}, Window(since, since, is_back=True, values={})
            self._step = step
            for name, value in (values or {}).items():
                columns.setdefault(name, []).append(value)
        if since is not None and self._step is not None:
            found = {name: aggregate(own) for name, own in columns.items()}
            self._window = joined(
                self._window, Window(since, self._step, is_back=False, values=found)
            )
        has_news = self._window and (self._window.values or self._window.step > self._window.since)
        return self._window if has_news else None

    def clear(self) -> None:
        """Forget the last `window`: it was sent."""
        self._window = None

    def forget(self) -> None:
        """Forget everything that was taken: this is a copy of the process."""
        self._taken.clear()
        self.clear()
