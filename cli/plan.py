"""What would become of a job, as ``muster submit --dry-run`` says it."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from cli.job_rows import what_runs
from cli.output import Output, show

if TYPE_CHECKING:
    from muster.client.views import JobPlan


def show_plan(plan: "JobPlan", asked: Mapping[str, object], output: Output) -> None:
    """Print the plan of what was `asked` for; its name is the id that the job would have."""
    import msgspec  # noqa: PLC0415  --help

    show(output, msgspec.to_builtins(plan), _lines(plan, asked), [plan.job_id])


def _lines(plan: "JobPlan", asked: Mapping[str, object]) -> Iterator[str]:
    facts = dict(_facts(plan, asked))
    width = max(map(len, facts))
    for name, text in facts.items():
        yield f"{name:<{width}}  {text}"
    yield "nothing was submitted: leave out --dry-run"


def _facts(plan: "JobPlan", asked: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    yield "job", plan.job_id
    yield "ranks", f"{plan.world_size}, {plan.spec['mode']}"
    yield "runs", what_runs(plan.spec)
    yield "started by", f"{plan.launcher} processes"
    # Of a command nobody knows whether it reads our data, unless somebody says so.
    unread = {"dataset_dir"} - asked.keys() if plan.command else set()
    for name in ("working_dir", "dataset_dir", "checkpoint_dir"):
        if plan.spec.get(name) and name not in unread:
            yield name.replace("_dir", " in"), plan.spec[name]
    if plan.shards_per_rank is not None:
        yield "shards", f"{plan.shards}: {_counts(plan.shards_per_rank)}"
    if plan.message:
        yield "note", plan.message


def _counts(per_rank: list[int]) -> str:
    """Return who gets how many; ranks that get equally many are one."""
    least, most = min(per_rank), max(per_rank)
    return f"{most} for each rank" if least == most else f"{least} to {most} for each rank"
