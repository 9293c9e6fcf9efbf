"""Merges a trace and prints where the time went: ``python -m bench.timeline FILE``.

A trace is what all processes append to the file that MUSTER_TRACE names. Each time line below is a
chain: from an anchor (a submitted job, a killed rank) to the first later stamp of each point.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]
Point = tuple[str, Mapping[str, Any]]
"""An event and the facts it must have; "@of" follows the process that the last point named."""

OF_RANK = {"pid": "@of"}

START: Sequence[Point] = (
    ("job received", {}),
    ("job stored", {}),
    ("performed", {"action": "StartAgent"}),
    ("agent launched", {}),
    ("agent began", {}),
    ("observed", {"observation": "AgentConnected"}),
    ("performed", {"action": "Start"}),
    ("order received", {"order": "StartRank"}),
    ("rank forked", {}),
    ("rank began", OF_RANK),
    ("rank ready", OF_RANK),
    ("performed", {"action": "PublishGroup"}),
    ("order received", {"order": "AnnounceGroup"}),
    ("group received", OF_RANK),
    ("group joined", OF_RANK),
    ("step", OF_RANK),
)

_DEATH: Sequence[Point] = (
    ("killed", {}),
    ("exit seen", {"of": "@of"}),
    ("exit contained", {}),
    ("exit recorded", {}),
    ("observed", {"observation": "RankExited"}),
    ("decided", {}),
)

SURVIVOR: Sequence[Point] = (
    *_DEATH,
    ("performed", {"action": "PublishGroup"}),
    ("order received", {"order": "AnnounceGroup"}),
    ("group received", {"pid": "@survivor"}),
    ("group joined", {"pid": "@survivor"}),
    ("step", {"pid": "@survivor"}),
)

REPLACEMENT: Sequence[Point] = (
    *_DEATH,
    ("performed", {"action": "Start"}),
    ("order received", {"order": "StartRank"}),
    ("rank forked", {}),
    ("rank began", OF_RANK),
    ("rank ready", OF_RANK),
    ("performed", {"action": "PublishGroup"}),
    ("group received", OF_RANK),
    ("group joined", OF_RANK),
    ("step", OF_RANK),
)


def main(file: Path) -> int:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines.sort(key=lambda line: line["time"])
    show("POST /jobs -> first step", START, walk_all(lines, START))
    show("kill -9 -> next step of a survivor", SURVIVOR, walk_all(lines, SURVIVOR))
    show("kill -9 -> first step of the replacement", REPLACEMENT, walk_all(lines, REPLACEMENT))
    return 0


def walk_all(lines: Sequence[Line], chain: Sequence[Point]) -> list[list[float]]:
    """Return the times of every complete passage through the chain, one per survivor."""
    anchors = [place for place, line in enumerate(lines) if line["event"] == chain[0][0]]
    found = []
    for anchor, following in zip(anchors, [*anchors[1:], len(lines)], strict=True):
        part = lines[anchor:following]
        stepped = {line["pid"] for line in part if line["event"] == "step"}
        before = {line["pid"] for line in lines[:anchor] if line["event"] == "step"}
        survivors = (stepped & before) - {part[0].get("of")}
        is_per_survivor = any("@survivor" in facts.values() for _, facts in chain)
        for survivor in survivors if is_per_survivor else [0]:
            times = walk(part, chain, survivor)
            if times is not None:
                found.append(times)
    return found


def walk(lines: Sequence[Line], chain: Sequence[Point], survivor: int) -> list[float] | None:
    """Return when each point was passed; None if one is missing."""
    known = {"@survivor": survivor, "@of": lines[0].get("of")}
    times, place = [lines[0]["time"]], 0
    for event, facts in chain[1:]:
        wanted = {name: known.get(value, value) for name, value in facts.items()}
        for next_place in range(place + 1, len(lines)):
            line = lines[next_place]
            if line["event"] == event and wanted.items() <= line.items():
                break
        else:
            return None
        place = next_place
        times.append(line["time"])
        if "of" in line:
            known["@of"] = line["of"]
    return times


def show(title: str, chain: Sequence[Point], walked: Sequence[Sequence[float]]) -> None:
    if not walked:
        return
    print(f"\n{title}: {len(walked)} of them, ms\n{'':44}    p50    p95   sum of p50")
    names = [" ".join([event, *facts.values()]) for event, facts in chain]
    for place, name in enumerate(names):
        since = [times[place] - times[max(0, place - 1)] for times in walked]
        begun = statistics.median(times[place] - times[0] for times in walked)
        print(f"{name:44} {1e3 * p50(since):6.2f} {1e3 * p95(since):6.2f} {1e3 * begun:8.2f}")


def p50(values: Sequence[float]) -> float:
    return statistics.median(values)


def p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
