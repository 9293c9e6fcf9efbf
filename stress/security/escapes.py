"""No field of a job may lead out of its directories or into a shell.

``python -m stress.security.escapes [--every N] [--seed S]`` puts some 200 known attack texts into
every string of a job and every path and query of the API. A job that is accepted is ended, read and
deleted by force. Requests go to a running job, and for each place an ordinary text, which must be
accepted, comes first. Files next to the installation must be neither changed nor shown. Links
replace files of jobs. Finally, jobs get all texts as arguments and as variables, through each
interface; the exact bytes must arrive.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stress.security.escape_payloads import injections, traversals
from stress.security.escape_places import JOB, PLACES, ordinary_query
from stress.security.escape_scene import Findings, Scene, filled, names_in
from stress.security.escape_words import arrived, sayable

GOAL = 500


@dataclass
class Escapes:
    """Results of all attempts."""

    findings: Findings = field(default_factory=Findings)
    texts: int = 0
    sent_as_words: int = 0
    changed: Mapping[str, Sequence[str]] = field(default_factory=dict)


def attempt(root: Path, *, every: int, seed: int) -> Escapes:
    """Try one in `every` combinations of a text and a place, below `root`."""
    escapes = Escapes()
    (root / "service").mkdir()
    scene = Scene(root / "service", escapes.findings)
    texts = [*traversals(scene.precious), *traversals(scene.precious.parent)]
    texts = list(dict.fromkeys([*texts, *injections(scene.mark)]))
    escapes.texts = len(texts)
    chance = random.Random(seed)  # noqa: S311  which combinations, not whose secrets

    def some() -> list[str]:
        return texts if every == 1 else chance.sample(texts, len(texts) // every)

    with scene.serving():
        for where, place in PLACES.items():
            scene.demand(where, scene.submit(where, place.ordinary, place.body(place.ordinary)))
            for text in some():
                scene.submit(where, text, place.body(text))
            scene.compare(where)
        for method, path, queries in list(scene.operations()):
            _call(scene, method, path, queries, some)
        _swap_links(scene)
    (root / "words").mkdir()
    mark = root / "words" / "mark"
    words = [*traversals(mark), *injections(mark)]
    escapes.changed = arrived(root / "words", words)
    escapes.sent_as_words = len(sayable(words)) * len(escapes.changed)
    if mark.exists():
        escapes.findings.breaches.append("a word of a command was run by a shell")
    return escapes


def _call(
    scene: Scene, method: str, path: str, queries: Sequence[str], some: Callable[[], list[str]]
) -> None:
    """Send texts for each name in a path, and in each of its queries."""
    for name in names_in(path):
        for text in some():
            scene.call("paths", text, method, filled(path, **{name: text}))
        scene.compare(f"{method} {path}, {name}")
    if method == "GET":
        scene.demand(f"GET {path}", scene.call("paths", "", method, filled(path)))
    for name in queries:
        where, ordinary = f"?{name}", ordinary_query(path, name)
        taken = scene.call(where, ordinary, method, filled(path), **{name: ordinary})
        scene.demand(f"{method} {path}?{name}={ordinary}", taken)
        for text in some():
            if "\ud800" <= text[:1] <= "\udfff":
                continue  # no client can send it
            scene.call(where, text, method, filled(path), **{name: text})
        scene.compare(f"{method} {path}?{name}")


def _swap_links(scene: Scene) -> None:
    files, log = scene.service.files.job(JOB), scene.precious / "logs" / "rank_00000.000.log"
    for link, target in [
        (scene.service.root / "checkpoints" / JOB, scene.precious),
        (files.root, scene.precious),
        (files.logs, scene.precious / "logs"),
        (files.log(0, 0), log),
        (files.times(0, 0), log),
        (files.agent_log, log),
        (files.exits, scene.precious),
    ]:
        scene.swap("links", link, target)
        scene.compare(f"a link at {link}")


def report(escapes: Escapes) -> Iterator[str]:
    findings = escapes.findings
    yield f"{'where':24}{'sent':>8}{'refused':>9}{'accepted':>10}"
    for where, refused in findings.refused.items():
        accepted = findings.accepted.get(where, 0)
        yield f"{where:24}{refused + accepted:8}{refused:9}{accepted:10}"
    yield f"{'all':24}{findings.sent:8}   of {escapes.texts} texts; goal: {GOAL} or more"
    for door, changed in escapes.changed.items():
        yield f"arguments and variables through {door}: {len(changed)} changed"
        yield from changed
    yield f"sent as arguments and as variables: {escapes.sent_as_words}; goal: 0 changed"
    yield f"ordinary texts refused, calls that met no job: {len(findings.lacking)}; goal: 0"
    yield from findings.lacking
    yield f"breaches: {len(findings.breaches)}; goal: 0"
    yield from findings.breaches


def is_good(escapes: Escapes) -> bool:
    """True if enough was tried and nothing escaped."""
    findings = escapes.findings
    is_enough = findings.sent >= GOAL and len(escapes.changed) > 0 and not findings.lacking
    return is_enough and not findings.breaches and not any(escapes.changed.values())


def main() -> int:
    """Run, print the report, and return 1 if anything escaped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="try one combination in N (1)")
    parser.add_argument("--seed", type=int, default=0, help="decides which (0)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        escapes = attempt(Path(directory), every=asked.every, seed=asked.seed)
    for line in report(escapes):
        print(line, flush=True)
    return int(not is_good(escapes))


if __name__ == "__main__":
    sys.exit(main())
