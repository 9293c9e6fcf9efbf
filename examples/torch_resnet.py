"""A small ResNet whose ranks may die, join and leave: it ends with the same bits.

    python examples/torch_resnet.py                               # alone
    muster run --elastic -n 2 examples/torch_resnet.py            # here and now: kill -9 a rank
    muster submit --elastic -n 2 --id resnet -- python examples/torch_resnet.py
    muster scale resnet 4

BatchNorm and augmentation need nothing special: statistics are averaged over all parts of a batch,
and random numbers depend on the part of the batch, not on the rank that computes it.
"""

import hashlib
import os
import random
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad, relu
from torch.utils.data import Dataset

import muster.torch

PAUSE_SECONDS = float(os.environ.get("PAUSE_SECONDS", "0.02"))  # so that there is time to kill
CLASSES = 10
EPOCHS, BATCH_SIZE = 6, 64


class Images(Dataset):
    """Noisy copies of one pattern for each class, shifted and flipped at random when read."""

    def __init__(self, count):
        patterns = torch.randn(CLASSES, 3, 32, 32)
        self.labels = torch.randint(0, CLASSES, (count,))
        self.images = patterns[self.labels] + 0.5 * torch.randn(count, 3, 32, 32)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = pad(self.images[index], (2, 2, 2, 2))
        top, left = torch.randint(0, 5, (2,)).tolist()
        image = image[:, top : top + 32, left : left + 32]
        return image.flip(2) if random.random() < 0.5 else image, self.labels[index]


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        hidden = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


def resnet():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Block(16, 16, stride=1),
        Block(16, 32, stride=2),
        Block(32, 64, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )


torch.manual_seed(0)
data = Images(512)
model = resnet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
steps = EPOCHS * len(data) // BATCH_SIZE
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps + 1)

run = muster.torch.join(
    model, optimizer, data=data, scheduler=scheduler, epochs=EPOCHS, batch_size=BATCH_SIZE
)


for images, labels in run.shards():
    loss = cross_entropy(model(images), labels)
    run.backward(loss)
    time.sleep(PAUSE_SECONDS)

bits = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
print(f"step {run.step}: sha256 {hashlib.sha256(bits).hexdigest()}", flush=True)
