"""Damages messages of compressed gradients: each is refused, and then nothing of it was added.

``python -m stress.wire_forms [SECONDS] [SEED]`` encodes arrays with every kind. A message that was
cut, lengthened, flipped or replaced, or is of another kind or length, must be a `PeerRefused`. A
body that was damaged before its digest was made, as a peer of the group could, is refused or says
other numbers: of no more elements than the changed bytes stand for, none twice and none outside.
To refuse takes memory in proportion to the message, whatever that says of its size.
"""

import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from muster.collectives.compression.kind import Kind, Message, Sparse, Vector
from muster.collectives.compression.kinds import kind_of
from muster.collectives.errors import PeerRefused
from stress.runner import Report, chance, main
from tests.promises.test_compression import HEADER_BYTES, SPECS

DAMAGES: Final = ("cut", "lengthened", "doubled", "noise", "other kind", "begin", "flipped")
SHAPES: Final = ((1, 1), (20, 20), (7, 147), (60, 50), (300, 400))
FLIPS: Final = 3
FLIP_ELEMENTS: Final = 1024
"""What one byte stands for, at most: all elements of a scale, a row or a column."""


def damaged(data: Message, other: Message, how: str, draw: random.Random) -> Message:
    """Return other bytes; `other` are those of another kind."""
    if how == "cut":
        return data[: draw.randrange(data.size)]
    if how == "lengthened":
        return np.append(data, np.frombuffer(draw.randbytes(draw.randint(1, 9)), np.uint8))
    if how == "noise":
        return np.frombuffer(draw.randbytes(draw.choice([data.size, 500])), np.uint8)
    if how in ("doubled", "other kind"):
        return np.append(data, data) if how == "doubled" else other
    found = data.copy()
    for _ in range(draw.randint(1, FLIPS)):
        place = draw.randrange(min(data.size, HEADER_BYTES) if how == "begin" else data.size)
        found[place] ^= draw.choice([255, 1 << draw.randrange(8)])
    return found


def problem(kind: Kind, how: str, right: Vector, body: Message) -> str:
    """Add a damaged body; return what is wrong with the result, "" if nothing."""
    out = np.zeros_like(right)
    if fault := refusal_fault(partial(kind.add_body, factor=1), body, out):
        return fault
    changed = np.count_nonzero(out.view(np.uint32) != right.view(np.uint32))
    if isinstance(kind, Sparse) and np.count_nonzero(out) > kind.kept_of(out.size):
        return f"{np.count_nonzero(out)} elements were added, not {kind.kept_of(out.size)}"
    is_bounded = how in ("begin", "flipped") and not isinstance(kind, Sparse)
    if is_bounded and out.any() and changed > FLIPS * FLIP_ELEMENTS:
        return f"{FLIPS} flips changed {changed} elements"
    return ""


def refusal_fault(add: Callable[..., None], data: Message, out: Vector) -> str | None:
    """Return what is wrong with a refusal, "" if nothing; None if `data` was added."""
    tracemalloc.start()
    try:
        add(data, out)
    except PeerRefused:
        taken, limit = tracemalloc.get_traced_memory()[1], 32 * data.nbytes + 65_536
        if out.any():
            return "something was added before it was refused"
        return f"{taken} bytes were taken to refuse {data.nbytes}" if taken > limit else ""
    finally:
        tracemalloc.stop()
    return None


def run(_directory: Path, seconds: float = 300.0, seed: int = 0) -> Report:
    """Stop at the first ten faults."""
    report, done, until = Report(), Counter[str](), time.monotonic() + seconds
    while time.monotonic() < until and len(report.faults) < 10:
        draw = chance((seed, done.total()))
        name, shape, how = draw.choice([*SPECS]), draw.choice(SHAPES), draw.choice(DAMAGES)
        array = np.random.default_rng(done.total()).standard_normal(shape, np.float32)
        kind, other = kind_of(SPECS[name]), kind_of(SPECS[draw.choice([*SPECS])])
        found = []
        message = kind.encode(array)
        if not np.array_equal(sent := damaged(message, other.encode(array), how, draw), message):
            out = np.zeros_like(array)
            fault = refusal_fault(kind.add, sent, out)
            found.append("it was added" if fault is None else fault)
        body, right = kind.encode_body(array), np.zeros_like(array)
        kind.add_body(body, right, 1)
        sent = damaged(body, other.encode_body(array), how, draw)
        with np.errstate(all="ignore"):
            found.append(problem(kind, how, right, sent))
        report.faults += [f"{done.total()}, {name}, {how}: {fault}" for fault in found if fault]
        done[how] += 1
    report.lines.append(f"{2 * done.total()} damaged messages and bodies: {dict(done)}")
    return report


if __name__ == "__main__":
    main(run)
