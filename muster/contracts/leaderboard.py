"""The comparison of jobs that train alternatives: which loss decides, and which job is the best."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from muster.contracts.job.status import JobStatus
from muster.contracts.views.job import LeaderboardRow, LeaderboardView, SummaryView

SWEEP_LABEL: Final = "sweep"
"""Jobs with the same value of this label are compared."""

VALIDATION: Final = ("val_loss", "validation_loss", "eval_loss")
"""Metrics that hold a validation loss; the last is that of the Trainer of Hugging Face."""

_BEFORE_OPTION: Final = re.compile(r" (?=--?[A-Za-z])")  # -1 is a value


def compare(
    sweep: str | None,
    jobs: Sequence[SummaryView],
    specs: Sequence[Mapping[str, Any]],
    sweeps: Sequence[str] = (),
) -> LeaderboardView:
    """Return the best jobs first; equal ones stay in their order.

    The metric of `keep_best` decides, if the jobs that have one agree, or else the lowest
    validation loss: if every job that has a loss reports it, FAILED jobs aside. Otherwise training
    loss does. Losses that are not finite come after the others, then jobs without one.
    `sweeps` are the names of all.
    """
    kept = {(rule["metric"], rule["mode"]) for spec in specs if (rule := spec.get("keep_best"))}
    metric, mode = kept.pop() if len(kept) == 1 else ("", "min")
    kind: Literal["validation", "training"] = "validation"
    for names in ((metric,), VALIDATION):
        losses = [
            next((job.metrics[name] for name in names if name in job.metrics), None) for job in jobs
        ]
        if any(loss is not None for loss in losses) and all(
            loss is not None or job.loss is None or job.status == JobStatus.FAILED
            for job, loss in zip(jobs, losses, strict=True)
        ):
            break
        metric, mode = "", "min"
    else:
        kind, losses = "training", [job.loss for job in jobs]
    sign = -1 if mode == "max" else 1
    rows = [
        LeaderboardRow(
            job_id=job.job_id,
            status=job.status,
            loss=loss,
            step=job.step,
            total_steps=job.total_steps,
            differences=differs,
        )
        for job, loss, differs in zip(jobs, losses, differences(specs), strict=True)
    ]
    rows.sort(
        key=lambda row: (row.loss is None, not math.isfinite(row.loss or 0), sign * (row.loss or 0))
    )
    best = (
        row.job_id
        for row in rows
        if row.status != JobStatus.FAILED and row.loss is not None and math.isfinite(row.loss)
    )
    return LeaderboardView(
        sweep=sweep,
        sweeps=list(sweeps),
        loss_kind=kind,
        metric=metric or None,
        best=next(best, None),
        jobs=rows,
    )


def which_sweep(known: Sequence[str], wanted: str | None = None) -> str:
    """Return which sweeps there are to choose from, or how to make one."""
    if known:
        no = f"there is no sweep {wanted!r}; " if wanted else ""
        return f"{no}name one of these sweeps (muster leaderboard NAME): {', '.join(known)}"
    return "no job has a label `sweep`: add one, as in muster submit --label sweep=lr"


def differences(specs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the fields of each spec that are not the same in all.

    An entry of a mapping is called ``env.LR``, an option of the command ``--lr``.
    """
    flat = [_flat(spec) for spec in specs]
    counts = Counter((name, repr(value)) for one in flat for name, value in one.items())
    return [
        {name: one[name] for name in one if counts[name, repr(one[name])] < len(flat)}
        for one in flat
    ]


def _flat(spec: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for field, value in spec.items():
        if isinstance(value, Mapping):
            flat |= {f"{field}.{name}": entry for name, entry in value.items()}
        elif field == "command" and value:
            flat[field], *options = _BEFORE_OPTION.split(" ".join(value))
            for option in options:
                name, *text = re.split("[ =]", option, maxsplit=1)
                flat[name] = text[0] if text else True
        else:
            flat[field] = value
    return flat
