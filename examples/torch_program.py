"""A PyTorch model as a program: the same bits for any number of ranks, and after any kill -9.

muster dataset synthetic --out data/points --samples 20000 --shards 4
muster submit -n 2 --program examples/torch_program.py:Net --set dataset_dir=data/points
"""

import torch
from torch.nn.functional import cross_entropy

from muster.program import Contribution

torch.set_num_threads(1)  # the ranks share the processor; and another number gives other bits


class Net:
    """A small network on samples such as ``{"x": [0.1, …], "y": 3}`` of sixteen features."""

    def __init__(self):
        layers = torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
        self.model = torch.nn.Sequential(*layers)

    def initial(self, seed):
        generator = torch.Generator().manual_seed(seed)
        state = self.model.state_dict().items()
        return {
            name: 0.1 * torch.randn(it.shape, generator=generator).numpy() for name, it in state
        }

    def gradient(self, state, batch, _random):
        self.model.load_state_dict({name: torch.tensor(array) for name, array in state.items()})
        self.model.zero_grad()
        inputs = torch.tensor([sample["x"] for sample in batch.samples])
        labels = torch.tensor([sample["y"] for sample in batch.samples])
        losses = cross_entropy(self.model(inputs), labels, reduction="none")
        loss = losses @ torch.tensor(batch.weights)  # the sum: Muster divides by the total weight
        loss.backward()
        gradients = {name: part.grad.numpy() for name, part in self.model.named_parameters()}
        return Contribution(gradients, loss=loss.item())

    def update(self, state, gradients, _step):
        return {name: array - 0.3 * gradients[name] for name, array in state.items()}
