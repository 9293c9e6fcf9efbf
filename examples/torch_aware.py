"""A PyTorch script with `import muster`: kill -9 it at any step, and it ends with the same bits.

    muster dataset synthetic --out data/points --samples 20000 --shards 4
    DATASET_DIR=data/points python examples/torch_aware.py     # by itself, or as a job:
    muster submit -n 2 --set dataset_dir=data/points -- python examples/torch_aware.py

Each rank trains a model of its own on its shards.
"""

import torch
from torch.nn.functional import cross_entropy

import muster

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
parts = {"model": model, "optimizer": optimizer}

run = muster.join()
run.restore(into=parts)
print(f"one of {run.world_size} ranks begins after step {run.steps_done}", flush=True)

for batch in run.batches():
    inputs = torch.tensor([sample["x"] for sample in batch])
    labels = torch.tensor([sample["y"] for sample in batch])
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()

    run.step(loss=loss.item())
    if run.should_checkpoint or run.should_stop:
        run.checkpoint(**parts)
    if run.should_stop:
        break
    run.rest(run.settings.sleep_sec)
else:
    run.checkpoint(**parts)
