"""A loop with `muster.torch` that goes on for as long as it is wanted; 1 million parameters."""

import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import muster.torch

PAUSE_SECONDS = 0.005  # after each virtual shard, as the ranks share the cores

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 960), nn.Tanh(), nn.Linear(960, 960), nn.Tanh(), nn.Linear(960, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
data = TensorDataset(torch.randn(16_000, 64), torch.randint(0, 10, (16_000,)))
run = muster.torch.join(model, optimizer, data=data, epochs=100_000)
for x, y in run.shards():
    run.backward(nn.functional.cross_entropy(model(x), y))
    time.sleep(PAUSE_SECONDS)
