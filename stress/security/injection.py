"""No field of a job may lead out of its directories or into a shell.

``python -m stress.security.injection [--every N] [--seed S]`` puts some 200 known attack texts into
every string of a job and every path and query of the API. A job that is accepted is ended, read and
deleted by force. Requests go to a running job, and for each place an ordinary text, which must be
accepted, comes first. Files next to the installation must be neither changed nor shown. Links
replace files of jobs. Finally, jobs get all texts as arguments and as variables, through each
interface; the exact bytes must arrive.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from cli.output import table
from stress.runner import Report, chance, main
from stress.security.injection_arguments import changed_arguments
from stress.security.injection_fields import JOB, PLACES, ordinary_query
from stress.security.injection_service import AttackedService, Findings, filled, names_in
from stress.security.payloads import injections, traversals

GOAL = 500


def run(directory: Path, *, every: int = 1, seed: int = 0) -> Report:
    """Try one in `every` combinations of a text and a place."""
    findings, draw = Findings(), chance(seed)
    (directory / "service").mkdir()
    service = AttackedService(directory / "service", findings)
    texts = [*traversals(service.precious), *traversals(service.precious.parent)]
    texts = list(dict.fromkeys([*texts, *injections(service.mark)]))

    def some() -> list[str]:
        return texts if every == 1 else draw.sample(texts, len(texts) // every)

    with service.serving():
        for where, place in PLACES.items():
            ordinary = service.submit(where, place.ordinary, place.body(place.ordinary))
            service.demand(where, ordinary)
            for text in some():
                service.submit(where, text, place.body(text))
            service.compare(where)
        for method, path, queries in list(service.operations()):
            _call(service, method, path, queries, some)
        _swap_links(service)
    (directory / "arguments").mkdir()
    mark = directory / "arguments" / "mark"
    arguments = [*traversals(mark), *injections(mark)]
    changed = changed_arguments(directory / "arguments", arguments)
    faults = [*findings.faults, *(f"not accepted: {it}" for it in findings.lacking)]
    faults += [
        f"changed through {door}: {word}" for door, words in changed.items() for word in words
    ]
    if mark.exists():
        faults.append("an argument of a command was run by a shell")
    if findings.sent < GOAL:
        faults.append(f"only {findings.sent} texts were sent")
    refused = findings.refused
    rows = [
        (it, refused[it] + (taken := findings.accepted.get(it, 0)), refused[it], taken)
        for it in refused
    ]
    lines = [*table(("where", "sent", "refused", "accepted"), rows)]
    lines.append(f"{findings.sent} sent, of {len(texts)} texts; goal: {GOAL} or more")
    lines.append(f"{len(arguments)} sent as arguments and variables through {', '.join(changed)}")
    return Report(lines, faults)


def _call(
    service: AttackedService,
    method: str,
    path: str,
    queries: Sequence[str],
    some: Callable[[], list[str]],
) -> None:
    """Send texts for each name in a path, and in each of its queries."""
    for name in names_in(path):
        for text in some():
            service.call("paths", text, method, filled(path, **{name: text}))
        service.compare(f"{method} {path}, {name}")
    if method == "GET":
        service.demand(f"GET {path}", service.call("paths", "", method, filled(path)))
    for name in queries:
        where, ordinary = f"?{name}", ordinary_query(path, name)
        taken = service.call(where, ordinary, method, filled(path), **{name: ordinary})
        service.demand(f"{method} {path}?{name}={ordinary}", taken)
        for text in some():
            if "\ud800" <= text[:1] <= "\udfff":
                continue  # no client can send it
            service.call(where, text, method, filled(path), **{name: text})
        service.compare(f"{method} {path}?{name}")


def _swap_links(service: AttackedService) -> None:
    files, log = service.service.files.job(JOB), service.precious / "logs" / "rank_00000.000.log"
    for link, target in [
        (service.service.root / "checkpoints" / JOB, service.precious),
        (files.root, service.precious),
        (files.logs, service.precious / "logs"),
        (files.log(0, 0), log),
        (files.times(0, 0), log),
        (files.agent_log, log),
        (files.exits, service.precious),
    ]:
        service.swap("links", link, target)
        service.compare(f"a link at {link}")


if __name__ == "__main__":
    main(run)
