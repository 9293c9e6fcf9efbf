"""One rank of one host as a process of its own, told by lines of JSON what group it is in.

Its arguments are its parent, which stands for the agent, the number of its own arena, and the
descriptors of all arenas in the parent. Each line it reads is one generation; the answer says how
far it came, what stopped it, and the sum of all that it was given.
"""

import json
import os
import sys
from typing import Any

from muster.collectives.arena import Arena, Geometry
from muster.collectives.arena_reducer import ArenaReducer
from muster.collectives.errors import CollectiveError
from muster.collectives.flags import Flags
from muster.collectives.tree import assign_blocks

LEAVES = 8


def main() -> None:
    parent, number, *descriptors = map(int, sys.argv[1:])
    geometry = Geometry(slot_count=LEAVES, elements=20_000)
    own = Arena.create(opened(parent, descriptors[number]), geometry)
    say("ready")
    for line in sys.stdin:
        task = json.loads(line)
        arenas = [
            own if each == number else Arena.attach(opened(parent, descriptors[each]))
            for each in task["members"]
        ]
        rank = task["members"].index(number)
        flags = Flags(
            arenas=arenas,
            rank=rank,
            generation=task["generation"],
            pidfds={
                peer: os.pidfd_open(pid) for peer, pid in enumerate(task["pids"]) if peer != rank
            },
            on_wait=lambda: None,
        )
        reducer = ArenaReducer(flags, opened(parent, task["result"]))
        say(json.dumps(train(reducer, rank, task)))


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  its parent reads it


def opened(parent: int, descriptor: int) -> int:
    return os.open(f"/proc/{parent}/fd/{descriptor}", os.O_RDWR)


def train(reducer: ArenaReducer, rank: int, task: dict[str, Any]) -> dict[str, Any]:
    layout = assign_blocks([()] * len(task["members"]), LEAVES)
    total, step = 0.0, 0
    try:
        while step != task["steps"]:
            for slot, block in zip(reducer.slots, layout[rank], strict=False):
                slot[:] = step * block.size
            result = reducer.all_reduce(layout, timeout_seconds=task["timeout_seconds"])
            assert result.min() == result.max()
            total += float(result[0])
            step += 1
    except CollectiveError as error:
        gone = getattr(error, "rank", None)
        return {"steps": step, "error": type(error).__name__, "rank": gone, "total": total}
    return {"steps": step, "error": None, "rank": None, "total": total}


if __name__ == "__main__":
    main()
