"""Ranks as real processes: the bits are those of one, and a kill is noticed by all."""

import hashlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from muster.collectives.summation import add_up, plan_of
from muster.collectives.tree import Block

WORLD_SIZE = 3
ELEMENTS = 100_000
LAYOUT = [[Block(0, 3), Block(1, 0)], [Block(0, 2)], [Block(2, 1)]]

RANK = """
import hashlib, json, socket, sys
import numpy
from numpy.random import default_rng
from muster.collectives.errors import ChannelClosed
from muster.collectives.handshake import Membership
from muster.collectives.message_reducer import MessageReducer
from muster.collectives.rendezvous import rendezvous
from muster.collectives.tree import Block

facts = json.loads(sys.argv[1])
rank, layout = facts["rank"], [[Block(*block) for block in blocks] for blocks in facts["layout"]]
own = Membership(rank=rank, world_size=len(layout), generation=1, token=b"token")
listener = socket.socket(fileno=facts["listener"]) if rank == 0 else None
backend = rendezvous(own, tuple(facts["address"]), listener=listener)

reducer = MessageReducer(backend, numpy.zeros((2, facts["elements"]), numpy.float32))
for slot, block in zip(reducer.slots, layout[rank]):
    slot[:] = default_rng(list(block)).standard_normal(facts["elements"])
print(hashlib.sha256(reducer.all_reduce(layout)).hexdigest(), flush=True)

if rank == len(layout) - 1:
    sys.stdin.read()  # until it is killed
try:
    backend.receive(1 - rank, 1)
except ChannelClosed as error:
    print(error, flush=True)
"""


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[str]]]:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        facts = {
            "layout": LAYOUT,
            "elements": ELEMENTS,
            "address": listener.getsockname(),
            "listener": listener.fileno(),
        }
        started = []
        for rank in range(WORLD_SIZE):
            process = subprocess.Popen(
                [sys.executable, "-c", RANK, json.dumps(facts | {"rank": rank})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[listener.fileno()] if rank == 0 else [],
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
        yield started


def test_processes_have_the_bits_of_one_and_notice_a_kill(
    ranks: list[subprocess.Popen[str]],
) -> None:
    blocks = [block for held in LAYOUT for block in held]
    values = [
        np.random.default_rng(list(block)).standard_normal(ELEMENTS).astype(np.float32)
        for block in blocks
    ]
    expected = np.empty(ELEMENTS, np.float32)
    add_up(plan_of(blocks), values, expected)
    assert [line(rank) for rank in ranks] == [hashlib.sha256(expected).hexdigest()] * WORLD_SIZE
    ranks[-1].kill()
    assert [line(rank) for rank in ranks[:2]] == [
        "the channel to rank 2 is closed: if it has ended, its log says why"
    ] * 2


def line(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    return rank.stdout.readline().strip()
