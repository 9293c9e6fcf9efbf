"""What the page shows of jobs, ranks and curves, as text. Pure.

`static/texts.js` says the same of a job and of a rank.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any, Final

import msgspec

from muster.client.progress import duration
from muster.contracts import leaderboard
from muster.contracts.job.status import TERMINAL
from muster.contracts.series import LOSS, THROUGHPUT

NOTHING: Final = "–"  # noqa: RUF001  a dash, as in print

SHAPES: Final = {
    "QUEUED": "○",
    "STARTING": "◔",
    "RUNNING": "▶",
    "RECOVERING": "↻",
    "PAUSED": "⏸",
    "STOPPING": "◼",
    "COMPLETED": "✓",
    "FAILED": "✗",
    "STOPPED": "■",
}
"""The page shows a status by its word, its shape and its colour."""

EXTREMES: Final = ("first", "least", "greatest", "last", "not_finite")

View = Mapping[str, Any]


def age(at: str) -> str:
    return duration((datetime.now(UTC) - datetime.fromisoformat(at)).total_seconds())


def of_total(view: View) -> str:
    return f"{view['step']}" + ("" if view["total_steps"] is None else f"/{view['total_steps']}")


def loss(view: View) -> str:
    return NOTHING if view["loss"] is None else f"{view['loss']:.4f}"


def rate(view: View) -> str:
    steps = view["throughput_steps_per_sec"]
    return f"{steps:.1f}/s" if steps else NOTHING


def eta(view: View) -> str:
    is_unknown = view["eta_seconds"] is None or view["status"] in TERMINAL
    return NOTHING if is_unknown else duration(view["eta_seconds"])


def short(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.6g}"


def pid(view: View) -> str:
    return NOTHING if view["pid"] is None else str(view["pid"])


def checkpoint(view: View) -> str:
    step = view["last_checkpoint_step"]
    return NOTHING if step is None else f"step {step}"


def ranks(view: View) -> str:
    is_over = view["status"] in TERMINAL
    return f"{view['world_size']}" if is_over else f"{view['living']}/{view['world_size']}"


TEXTS: Final[Mapping[str, Callable[[View], str]]] = {
    "status": lambda view: f"{SHAPES.get(view['status'], '?')} {view['status']}",
    "message": lambda view: view["message"] or "",
    "step": of_total,
    "loss": loss,
    "bits": lambda view: view["bits"],
    "rate": rate,
    "eta": eta,
    "ranks": ranks,
    "restarts": lambda view: str(view["restarts"]),
    "checkpoint": checkpoint,
    "process": lambda view: view["process"],
    "pid": pid,
    "node": lambda view: view["node"] or NOTHING,
}


def progress(view: View) -> int:
    """Return how much is done, in percent; 0 while that is unknown."""
    total = view["total_steps"]
    return 100 if view["status"] == "COMPLETED" else 100 * view["step"] // total if total else 0


BEHIND_SECONDS: Final = 5
"""How far behind is much: a heartbeat comes every two seconds, with the steps since."""


def differing(workers: Iterable[View]) -> dict[int, str]:
    """Return the living ranks that differ from the median of them, each with a word."""
    alive = [worker for worker in workers if worker["process"] in {"live", "suspect"}]
    rates = {worker["rank"]: worker["throughput_steps_per_sec"] for worker in alive}
    usual = median([rate for rate in rates.values() if rate] or [0])
    reached = median([worker["step"] for worker in alive] or [0]) - max(2, usual * BEHIND_SECONDS)
    found = {}
    for worker in alive:
        rank, rate = worker["rank"], rates[worker["rank"]] or usual
        if worker["process"] == "suspect" or worker["step"] < reached:
            found[rank] = "suspect" if worker["process"] == "suspect" else "behind"
        elif not usual / 2 <= rate <= usual * 2:
            found[rank] = "slow" if rate < usual else "fast"
    return found


def in_order(names: Iterable[str]) -> list[str]:
    """Return the loss first, then the throughput, then the metrics by name."""
    return sorted(set(names), key=lambda name: (name != LOSS, name != THROUGHPUT, name))


def differences(specs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the fields that are not the same in all, as texts, as `muster leaderboard` does."""
    found = leaderboard.differences(specs)
    fields = dict.fromkeys(field for one in found for field in one)
    return {field: [_text(one.get(field)) for one in found] for field in fields}


def _text(value: object) -> str:
    if value is None:
        return NOTHING
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
