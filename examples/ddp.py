"""A PyTorch DDP script as for torchrun. Kill any rank: all resume from the last checkpoint.

muster run -n 2 examples/ddp.py
muster submit -n 2 --gang -- python examples/ddp.py
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 100

dist.init_process_group("gloo")  # the address and the rank come from the environment
rank = dist.get_rank()
saved = Path("checkpoints", f"ddp-{os.environ.get('TORCHELASTIC_RUN_ID', 'alone')}.pt")
draft = saved.with_suffix(".draft")

torch.manual_seed(0)
layers = torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
begin = 0
# The hosts may share no directory: what rank 0 has saved it sends to the others.
found = [torch.load(saved) if rank == 0 and saved.exists() else None]
dist.broadcast_object_list(found)
if (state := found[0]) is not None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    begin = state["step"]
print(f"one of {dist.get_world_size()} ranks begins after step {begin}", flush=True)

for step in range(begin + 1, STEPS + 1):
    generator = torch.Generator().manual_seed(step * 1000 + rank)  # your data loader
    inputs = torch.randn(32, 16, generator=generator)
    optimizer.zero_grad()
    loss = (model(inputs).squeeze() - inputs.sum(1)).square().mean()
    loss.backward()
    optimizer.step()
    time.sleep(0.1)  # so that there is time to kill a rank

    if rank == 0 and step % 10 == 0:
        print(f"step {step}  loss {loss.item():.4f}", flush=True)
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        saved.parent.mkdir(exist_ok=True)
        torch.save(state, draft)
        draft.replace(saved)  # atomic: a kill leaves the old checkpoint or the new one

weights = torch.cat([part.detach().flatten() for part in model.parameters()])
print(f"ends with weights of sum {weights.double().sum().item()!r}", flush=True)
dist.destroy_process_group()
