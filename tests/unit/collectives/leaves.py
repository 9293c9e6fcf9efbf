"""Leaves to add up, their one right sum, and ways to spread them over ranks, for the reducers."""

import random

import numpy as np

from muster.collectives.backend import Vector
from muster.collectives.summation import add_up, plan_of
from muster.collectives.tree import Block, blocks_of_range

LEAVES = 16
Layout = list[tuple[Block, ...]]


def leaves_of(elements: int) -> list[Vector]:
    rng = np.random.default_rng(elements)
    leaves = rng.standard_normal((LEAVES, elements)).astype(np.float32)
    leaves[3, 0] = np.nan
    return list(leaves)


def sum_of(leaves: list[Vector]) -> Vector:
    """Return the root's sum, or that of the one block whose leaves are given."""
    out = np.empty_like(leaves[0])
    add_up(plan_of([Block(0, number) for number in range(len(leaves))]), leaves, out)
    return out


def layout_by_chance(world_size: int, chance: random.Random) -> Layout:
    """Any rank may hold any blocks, or none."""
    held: list[list[Block]] = [[] for _ in range(world_size)]
    at = 0
    while at < LEAVES:
        stop = chance.randint(at + 1, LEAVES)
        held[chance.randrange(world_size)] += blocks_of_range(at, stop)
        at = stop
    return [tuple(blocks) for blocks in held]
