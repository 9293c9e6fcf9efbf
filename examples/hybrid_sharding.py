"""State sharded inside a host, replicated across: ``python examples/hybrid_sharding.py``.

Each rank keeps a part of the weights. Inside its host a sub-group gathers the parts before a step
and reduces the gradients to parts after it; across hosts another sub-group adds up equal parts. So
the network between hosts carries a part per rank, and the memory of a rank holds a part of the
optimizer's state. Eight ranks of two hosts run here as threads of one process; a group of
`TcpBackend.connect` does the same on machines.
"""

import numpy as np
from numpy.typing import NDArray

from muster.collectives import (
    SimulatedBackend,
    SubBackend,
    all_gather,
    all_reduce,
    broadcast,
    reduce_scatter,
)
from muster.collectives.backend import Backend
from muster.collectives.simulated import run_ranks

HOSTS, RANKS_PER_HOST = 2, 4
STEPS, SAMPLES, FEATURES = 200, 64, 32  # FEATURES is a multiple of the ranks of a host
TRUE_WEIGHTS = np.linspace(-1, 1, FEATURES)


def train(backend: Backend) -> NDArray[np.float64]:
    """Fit a linear model; return the part of the weights that this rank holds."""
    host, place = divmod(backend.rank, RANKS_PER_HOST)
    inside = SubBackend(backend, range(host * RANKS_PER_HOST, (host + 1) * RANKS_PER_HOST))
    across = SubBackend(backend, range(place, backend.world_size, RANKS_PER_HOST))
    part = np.zeros(FEATURES // RANKS_PER_HOST)
    velocity = np.zeros_like(part)
    broadcast(across, part)  # here they are equal already
    samples = np.random.default_rng(backend.rank)
    for _ in range(STEPS):
        weights = all_gather(inside, part).reshape(-1)
        x = samples.standard_normal((SAMPLES, FEATURES))
        error = x @ weights - x @ TRUE_WEIGHTS
        gradient = reduce_scatter(inside, x.T @ error / SAMPLES, "mean")
        all_reduce(across, gradient, "mean")
        velocity = 0.5 * velocity + gradient
        part -= 0.1 * velocity
    return part


def main() -> None:
    parts = run_ranks(SimulatedBackend.create_group(HOSTS * RANKS_PER_HOST), train)
    hosts = np.concatenate(parts).reshape(HOSTS, FEATURES)
    print("hosts hold the same bits:", all(host.tobytes() == hosts[0].tobytes() for host in hosts))
    print(f"largest error of a weight: {np.abs(hosts[0] - TRUE_WEIGHTS).max():.1e}")


if __name__ == "__main__":
    main()
