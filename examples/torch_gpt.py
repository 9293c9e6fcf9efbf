"""A small GPT whose ranks may die, join and leave: it ends with the same bits.

    python examples/torch_gpt.py                                  # alone
    muster run --elastic -n 2 examples/torch_gpt.py               # here and now: kill -9 a rank
    muster submit --elastic -n 2 --id gpt -- python examples/torch_gpt.py
    muster scale gpt 4

It learns the characters of a text that every Python brings along, a line as one sample. Lines have
different lengths, so the weight of a loss is its number of characters.
"""

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import TensorDataset

import muster.torch

PAUSE_SECONDS = float(os.environ.get("PAUSE_SECONDS", "0.02"))  # so that there is time to kill
CONTEXT, WIDTH, HEADS, LAYERS = 80, 128, 4, 3  # 0.6 million parameters
PADDING = 0
EPOCHS, BATCH_SIZE = 4, 64


class Block(nn.Module):
    """Causal attention and a perceptron, each added to its input."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x):
        heads = self.attention(self.norm1(x)).unflatten(2, (3 * HEADS, -1)).transpose(1, 2)
        mixed = scaled_dot_product_attention(*heads.chunk(3, dim=1), is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Predicts the next character at every place of a line."""

    def __init__(self, vocabulary):
        super().__init__()
        self.characters = nn.Embedding(vocabulary, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary))

    def forward(self, characters):
        places = torch.arange(characters.shape[1])
        return self.head(self.blocks(self.characters(characters) + self.places(places)))


torch.manual_seed(0)
lines = [line[:CONTEXT] + "\n" for line in Path(argparse.__file__).read_text().splitlines() if line]
alphabet = sorted(set("".join(lines)))
numbers = {character: 1 + place for place, character in enumerate(alphabet)}  # 0 is padding
samples = [torch.tensor([numbers[it] for it in line]) for line in lines[:512]]
inputs = pad_sequence([it[:-1] for it in samples], batch_first=True, padding_value=PADDING)
targets = pad_sequence([it[1:] for it in samples], batch_first=True, padding_value=PADDING)

model = Gpt(1 + len(alphabet))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
steps = EPOCHS * len(samples) // BATCH_SIZE
warmup = LinearLR(optimizer, 0.1, total_iters=steps // 10)
cosine = CosineAnnealingLR(optimizer, steps - steps // 10)

run = muster.torch.join(
    model,
    optimizer,
    data=TensorDataset(inputs, targets),
    scheduler=SequentialLR(optimizer, [warmup, cosine], milestones=[steps // 10]),
    epochs=EPOCHS,
    batch_size=BATCH_SIZE,
)


@run.before_step
def clip():  # every .grad holds the mean over all ranks
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


for x, y in run.shards():
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=PADDING)
    run.backward(loss, weight=(y != PADDING).sum().item())
    time.sleep(PAUSE_SECONDS)

bits = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
print(f"step {run.step}: sha256 {hashlib.sha256(bits).hexdigest()}", flush=True)
