# ruff: noqa: T201  a training script prints
"""Trains with torch's DistributedDataParallel as any script for torchrun does; for tests.

It saves to DIR/state.pt and goes on from there. A rank that finds DIR/fail fails.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

STEPS = 30
DIRECTORY = Path(sys.argv[1])
STATE = DIRECTORY / "state.pt"


@record
def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begun = 0
    if STATE.exists():
        state = torch.load(STATE)
        begun = state["step"]
        model.load_state_dict(state["model"])
    print(f"rank {rank} of {dist.get_world_size()} goes on from step {begun}", flush=True)
    for step in range(begun + 1, STEPS + 1):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step * 64 + rank))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        if rank == 0:
            torch.save({"step": step, "model": model.state_dict()}, STATE.with_suffix(".draft"))
            STATE.with_suffix(".draft").replace(STATE)
        if (DIRECTORY / "fail").exists() and rank == 1:
            raise ValueError("no such optimizer")
        time.sleep(0.05)
    print("weights", model.module.weight.tolist(), model.module.bias.tolist(), flush=True)
    dist.destroy_process_group()


main()
