"""A PyTorch loop whose ranks may die, join and leave: it ends with the same bits.

    python examples/torch_elastic.py                              # alone
    muster run --elastic -n 2 examples/torch_elastic.py           # here and now: kill -9 a rank
    muster submit --elastic -n 2 --id elastic -- python examples/torch_elastic.py
    muster scale elastic 4

Three lines are Muster's. The body of the loop runs for parts of each batch, on any rank.
"""

import hashlib
import os
import time

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import muster.torch

PAUSE_SECONDS = float(os.environ.get("PAUSE_SECONDS", "0.02"))  # so that there is time to kill

torch.manual_seed(0)
inputs = torch.randn(2000, 16)
labels = inputs[:, :4].argmax(1)

model = torch.nn.Sequential(
    torch.nn.Linear(16, 64),
    torch.nn.BatchNorm1d(64),
    torch.nn.ReLU(),
    torch.nn.Dropout(0.1),
    torch.nn.Linear(64, 4),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 160)

run = muster.torch.join(  # 1
    model, optimizer, data=TensorDataset(inputs, labels), scheduler=scheduler, epochs=5
)


@run.before_step
def clip():  # every .grad holds the mean over all ranks
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


for x, y in run.shards():  # 2, instead of: for x, y in loader
    loss = cross_entropy(model(x), y)
    run.backward(loss)  # 3, instead of: zero_grad, backward, step
    time.sleep(PAUSE_SECONDS)

bits = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
print(f"step {run.step}: sha256 {hashlib.sha256(bits).hexdigest()}", flush=True)
