"""Scripts with `muster.torch` through the whole system: ranks that die, join and leave."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from muster.checkpoints.manifest import CheckpointName
from muster.contracts.environ import SPARE_RANK
from muster.contracts.paths import checkpoints_of_job
from muster.host.containment import tagged_processes
from muster.host.processes import all_pids, read_environment
from stress.torch_schedules import MODELS, Schedule, TorchJob
from tests.support.installation import (
    Installation,
    Seen,
    await_value,
    is_over,
    is_running,
    newest_checkpoint,
    pids,
    restarts,
)

pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # a dozen starts with torch

SEED = 60  # of a schedule that begins with two ranks
EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_elastic.py"
SMALL = """
import torch
from torch.utils.data import TensorDataset
import muster.torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 4))
lrs = torch.optim.lr_scheduler.StepLR(optimizer, 1)
run = muster.torch.join(model, optimizer, data=data, batch_size=32)
"""


def submit(installation: Installation, world_size: int, pause: float = 0.0, **more: object) -> str:
    fields = {
        "mode": "synchronous",
        "command": [sys.executable, "-W", "ignore", str(EXAMPLE)],
        "virtual_shards": 8,
        "env": {"PAUSE_SECONDS": str(pause)},
        "world_size": world_size,
        "spare_ranks": 0,  # each loads torch, too: they are kept where a rank dies
        **more,
    }
    return installation.submit(**fields)


def has_saved_once(seen: Seen) -> bool:
    return seen["last_checkpoint_step"] is not None


def digest_of(text: str) -> str:
    (digest,) = set(re.findall(r"sha256 ([0-9a-f]{64})", text))
    return str(digest)


def digests(installation: Installation, job_id: str, ranks: int) -> set[str]:
    """Return what the ranks print of their final models."""
    return {digest_of(installation.log(job_id, rank)) for rank in range(ranks)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the example prints if it is typed, without any service."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLE)],
        cwd=tmp_path_factory.mktemp("alone"),
        env={"PAUSE_SECONDS": "0"},
        check=True,
        capture_output=True,
        text=True,
    )
    return digest_of(ended.stdout)


def test_ranks_that_die_join_and_leave_change_no_bit(
    installation: Installation, alone: str
) -> None:
    job_id = submit(installation, 2, pause=0.03, max_workers=3, spare_ranks=1)
    installation.wait_until(job_id, has_saved_once)
    uid = installation.job(job_id)["job_uid"]
    (spare,) = await_value(lambda: tagged_processes(f"{uid}/{SPARE_RANK}"), lambda: "no spare")
    installation.kill(job_id, 1)
    # It has run up to `join`, or is about to.
    installation.wait_until(job_id, lambda now: is_running(now) and spare.pid in pids(now))
    answer = installation.request("PATCH", f"/jobs/{job_id}", json={"world_size": 3})
    assert answer.is_success, answer.text
    installation.wait_until(job_id, lambda seen: is_running(seen) and len(seen["workers"]) == 3)
    installation.kill(job_id, 0)
    installation.complete(job_id)
    assert digests(installation, job_id, 3) == {alone}
    audit = installation.request("GET", f"/jobs/{job_id}/audit").json()
    assert audit["exactly_once"] is True


def test_a_stopped_job_is_resumed_with_the_same_bits(
    installation: Installation, alone: str
) -> None:
    first = submit(installation, 2, pause=0.03)
    installation.wait_until(first, has_saved_once)
    installation.stop(first)
    seen = installation.wait_until(first, lambda seen: seen["status"] == "STOPPED")
    assert 0 < seen["last_checkpoint_step"] < 160
    second = submit(installation, 1, resume_from=first)
    installation.complete(second)
    assert digests(installation, second, 1) == {alone}
    place = checkpoints_of_job(installation.checkpoint_dir, second)
    assert newest_checkpoint(place, 0, None).step == 160


def test_a_rank_with_an_edited_script_is_refused(
    installation: Installation, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(EXAMPLE.read_text())
    command = [sys.executable, "-W", "ignore", script.name]
    job_id = submit(installation, 2, pause=0.1, command=command, working_dir=str(tmp_path))
    installation.wait_until(job_id, lambda seen: is_running(seen) and has_saved_once(seen))
    script.write_text(f"{EXAMPLE.read_text()}\n")
    for _ in range(2):  # a spare process has loaded the script before it was edited
        installation.kill(job_id, 1)
        seen = installation.wait_until(
            job_id, lambda seen: is_over(seen) or (is_running(seen) and all(pids(seen)))
        )
        if is_over(seen):
            break
    assert installation.fail(job_id)["reason"] == "code_changed"


@pytest.mark.parametrize("model", ["resnet", "gpt"])
def test_killed_ranks_of_a_larger_model_change_no_bit(
    installation: Installation, model: str
) -> None:
    shortened = replace(MODELS[model], pause_seconds=0.05, fields={"epochs": 2})
    alone = TorchJob(installation, shortened, world_size=1, spare_ranks=0).end()
    assert Schedule(installation, shortened, SEED, kills=2, scalings=0).run() == alone


BUFFERS = """
import hashlib
import torch
from torch.utils.data import TensorDataset
import muster.torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("visible", torch.ones(4, 4).tril().bool())
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        scores = (self.layer(x)[:, None] + self.mask).softmax(-1)
        return scores[:, self.visible]

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(50, 4))
run = muster.torch.join(model, optimizer, data=data, batch_size=16, epochs=4)
for (x,) in run.shards():
    run.backward(model(x).square().mean())
tensors = list(model.state_dict().values())
assert model.mean.abs().sum() > 0 and not any(it.isnan().any() for it in tensors)
print("sha256", hashlib.sha256(b"".join(it.numpy().tobytes() for it in tensors)).hexdigest())
"""


STAGED = """
import muster.torch.run
from muster.torch.state import TrainingState

class Staged(TrainingState):
    def is_staged(self, tensor):
        return True

muster.torch.run.TrainingState = Staged
"""
"""As tensors of a GPU are, apart from the replica."""


def test_buffers_that_a_forward_pass_replaces_have_the_same_bits(
    installation: Installation, tmp_path: Path
) -> None:
    found = {}
    for before, world_size in (("", 1), ("", 2), ("", 3), (STAGED, 2)):
        (tmp_path / "train.py").write_text(before + BUFFERS)
        command = [sys.executable, "train.py"]
        fields = {"command": command, "min_workers": world_size, "working_dir": str(tmp_path)}
        job_id = submit(installation, world_size, **fields)
        installation.complete(job_id)
        found[before, world_size] = digests(installation, job_id, world_size)
    assert len(set.union(*found.values())) == 1, found


EVERYTHING = """
import hashlib, multiprocessing, os, random, time
import numpy as np
import torch
from torch.optim.lr_scheduler import MultiStepLR, ReduceLROnPlateau
import muster.torch

of_items, of_body = np.random.default_rng(3), torch.Generator()

class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 150

    def __getitem__(self, index):
        noise = torch.rand(4) + random.random() + np.random.rand() + of_items.random()
        return torch.full((4,), index / 150) + noise.float()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
lr = torch.tensor(0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.1)
average = torch.optim.swa_utils.AveragedModel(model)
plateau = ReduceLROnPlateau(optimizer, patience=1)
run = muster.torch.join(
    model, optimizer, data=Noisy(), scheduler=MultiStepLR(optimizer, [5, 9]), batch_size=32,
    epochs=20, drop_last=True, num_workers=int(os.environ["WORKERS"]),
)
run.register(average=average, plateau=plateau, of_items=of_items, of_body=of_body)
run.values["heat"] = 1.0
multiprocessing.Process(target=time.sleep, args=(1000,), daemon=True).start()

@run.before_step
def check():
    assert run.epoch == run.step // run.steps_per_epoch

@run.after_step
def look():
    assert run.epoch == (run.step - 1) // run.steps_per_epoch
    average.update_parameters(model)
    plateau.step(run.loss)
    run.values.setdefault("losses", []).append(run.loss)
    run.values["heat"] *= 0.9
    if run.step == 2:
        model[0].requires_grad_(False)
    if run.step == 30:
        run.stop()
    time.sleep(float(os.environ.get("PAUSE", "0")))

for x in run.shards():
    assert run.epoch == run.step // run.steps_per_epoch
    noise = torch.rand(x.shape, generator=of_body) * run.values["heat"]
    run.backward(model(x + noise).square().mean())
assert not model[0].weight.requires_grad
assert run.step == len(run.values["losses"])
assert run.epoch == (run.step - 1) // run.steps_per_epoch
tensors = [*model.state_dict().values(), *average.state_dict().values()]
bits = b"".join(it.numpy().tobytes() for it in tensors) + repr(run.values).encode()
print("sha256", hashlib.sha256(bits).hexdigest())
"""


def test_all_that_a_loop_may_have_survives_a_kill_and_a_stop(
    installation: Installation, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(EVERYTHING)
    command = [sys.executable, "-W", "ignore", "train.py"]
    fields = {"command": command, "working_dir": str(tmp_path)}
    calm = submit(installation, 1, env={"WORKERS": "0"}, **fields)
    installation.complete(calm)
    env = {"WORKERS": "2", "PAUSE": "0.4"}
    killed = submit(installation, 2, env=env, spare_ranks=1, **fields)
    installation.wait_until(killed, has_saved_once)
    installation.kill(killed, 0)
    installation.wait_until(killed, restarts(1))
    installation.stop(killed)
    seen = installation.wait_until(killed, lambda seen: seen["status"] == "STOPPED")
    assert seen["last_checkpoint_step"] == seen["step"] < 31
    resumed = submit(installation, 2, env={"WORKERS": "2"}, resume_from=killed, **fields)
    assert installation.complete(resumed)["step"] == 31
    found = {*digests(installation, calm, 1), *digests(installation, resumed, 2)}
    assert len(found) == 1
    for job_id in (calm, resumed):
        audit = installation.request("GET", f"/jobs/{job_id}/audit").json()
        assert [epoch["samples"] for epoch in audit["epochs"]] == [128] * 7
        assert all(epoch["exactly_once"] for epoch in audit["epochs"])
    # What goes on from a job that has ended early does not end with it.
    later = submit(installation, 1, env={"WORKERS": "0"}, resume_from=resumed, **fields)
    assert installation.complete(later)["step"] == 80


ENDS = """
import hashlib
print("sha256", hashlib.sha256(
    b"".join(it.numpy().tobytes() for it in tensors) + repr(run.values).encode()
).hexdigest())
"""
BEGINS = """
import os, pathlib, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import muster.torch

def die_once(there):
    died = pathlib.Path("died")
    if there and run.step == 5 and run.rank == int(os.environ["DIES"]) and not died.exists():
        died.touch()
        os._exit(3)

def note():
    run.values.setdefault("losses", []).append([*run.losses])
    time.sleep(float(os.environ["PAUSE"]))

torch.manual_seed(0)
"""
GAN = f"""{BEGINS}
g = nn.Sequential(
    nn.ConvTranspose2d(4, 4, 4, 1, 0), nn.BatchNorm2d(4), nn.ReLU(True),
    nn.ConvTranspose2d(4, 1, 4, 2, 1), nn.Tanh(),
)
d = nn.Sequential(
    nn.Conv2d(1, 4, 4, 2, 1), nn.BatchNorm2d(4), nn.LeakyReLU(0.2, True),
    nn.Conv2d(4, 1, 4, 1, 0), nn.Sigmoid(),
)
criterion = nn.BCELoss()
od, og = (torch.optim.Adam(it.parameters(), lr=0.002, betas=(0.5, 0.999)) for it in (d, g))
lrs = [torch.optim.lr_scheduler.ExponentialLR(it, 0.9) for it in (od, og)]
data = TensorDataset(torch.rand(80, 1, 8, 8))
run = muster.torch.join(
    [d, g], [od, og], data=data, batch_size=32, epochs=6, scheduler=lrs,
    num_workers=int(os.environ["WORKERS"]),
)
run.after_step(note)
for (real,) in run.shards():
    label = torch.ones(len(real))
    run.backward(criterion(d(real).view(-1), label), of=od)
    fake = g(torch.randn(len(real), 4, 1, 1))
    label.fill_(0)
    run.backward(criterion(d(fake.detach()).view(-1), label), of=od)
    label.fill_(1)
    loss = criterion(d(fake).view(-1), label)
    if run.step % 3:  # one optimizer steps less often
        run.backward(loss, of=og)
    die_once(g[0].weight.grad is not None)  # in the second turn
assert run.step == len(run.values["losses"]) == g[1].num_batches_tracked == lrs[1].last_epoch
assert d[1].num_batches_tracked == 3 * run.step and run.loss == run.losses[1]
assert [int(it.state[m[0].weight]["step"]) for it, m in ((od, d), (og, g))] == [18, 12]
tensors = [*d.state_dict().values(), *g.state_dict().values()]
{ENDS}
"""
TOGETHER = f"""{BEGINS}
model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 2))
matrices = [it for it in model.parameters() if it.dim() == 2]
others = [it for it in model.parameters() if it.dim() != 2]
kind = getattr(torch.optim, "Muon", torch.optim.SGD)
optimizers = [kind(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]
lrs = [torch.optim.lr_scheduler.StepLR(it, 2, 0.9) for it in optimizers]
data = TensorDataset(torch.randn(80, 4))
run = muster.torch.join(
    model, optimizers, data=data, scheduler=lrs, batch_size=32, epochs=6,
    num_workers=int(os.environ["WORKERS"]),
)
run.after_step(note)
for (x,) in run.shards():
    run.backward(model(x).square().mean())
    die_once(True)
assert run.step == len(run.values["losses"]) == lrs[1].last_epoch
assert {{len(it) for it in run.values["losses"]}} == {{1}}
tensors = [*model.state_dict().values()]
{ENDS}
"""


@pytest.mark.parametrize("script", [GAN, TOGETHER], ids=["in turns", "together"])
def test_several_optimizers_survive_kills_and_a_stop(
    installation: Installation, tmp_path: Path, script: str
) -> None:
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-W", "ignore", "train.py"]
    fields = {"command": command, "working_dir": str(tmp_path)}
    env = {"DIES": "-1", "PAUSE": "0", "WORKERS": "0"}
    calm = submit(installation, 1, env=env, **fields)
    installation.complete(calm)
    three = submit(installation, 3, env={**env, "WORKERS": "1"}, min_workers=3, **fields)
    installation.complete(three)
    dying = {**env, "DIES": "1", "PAUSE": "0.4"}
    killed = submit(installation, 2, env=dying, min_workers=2, **fields)
    installation.wait_until(killed, restarts(1, rank=1))
    installation.stop(killed)
    seen = installation.wait_until(killed, lambda seen: seen["status"] == "STOPPED")
    assert 5 <= seen["last_checkpoint_step"] == seen["step"] < 18
    resumed = submit(installation, 2, env=env, resume_from=killed, **fields)
    assert installation.complete(resumed)["step"] == 18
    jobs = {calm: 1, three: 3, resumed: 2}
    assert len({it for job_id, n in jobs.items() for it in digests(installation, job_id, n)}) == 1
    audit = installation.request("GET", f"/jobs/{resumed}/audit").json()
    assert [epoch["samples"] for epoch in audit["epochs"]] == [80] * 6


REPORTS = f"""{SMALL}
@run.after_step
def evaluate():
    if run.is_main:
        run.report(val_loss=1 / run.step)

for (x,) in run.shards():
    run.backward(model(x).square().mean())
if run.is_main:
    run.report(accuracy=0.75)
"""


def test_what_one_rank_reports_is_in_curve_metrics_and_leaderboard(
    installation: Installation, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(REPORTS)
    fields = {"command": [sys.executable, "train.py"], "working_dir": str(tmp_path)}
    keep = {"keep_best": {"metric": "val_loss", "mode": "max"}, "keep_last": 1}
    job_id = submit(installation, 2, epochs=4, labels={"sweep": "torch"}, **keep, **fields)
    installation.complete(job_id)
    place = checkpoints_of_job(installation.checkpoint_dir, job_id)
    kept = filter(None, (CheckpointName.parse(it.name) for it in place.iterdir()))
    assert sorted(it.step for it in kept) == [1, 8]
    series = installation.request("GET", f"/jobs/{job_id}/series").json()["series"]
    assert (series["val_loss"]["live"]["step"][-1], series["accuracy"]["live"]["last"]) == (
        8,
        [0.75],
    )
    board = installation.request("GET", "/leaderboard?sweep=torch").json()
    assert (board["loss_kind"], board["jobs"][0]["loss"]) == ("validation", 0.125)
    assert 'metric="accuracy",name=""} 0.75' in installation.request("GET", "/metrics").text


BACKWARD = "for (x,) in run.shards():\n run.backward(model(x).sum())"
PAIR = """a, b = (torch.nn.Linear(4, 2) for _ in range(2))
oa, ob = (torch.optim.SGD(it.parameters(), lr=0.1) for it in (a, b))
run = muster.torch.join([a, b], [oa, ob], data=data, batch_size=32)
for (x,) in run.shards():
"""
TURNS = f"{PAIR} run.backward(a(x).sum(), of=oa)\n run.backward(b(x).sum(), of=ob)"
JOIN = "run = muster.torch.join(model, optimizer, data={})"  # takes the place of that of SMALL
MISTAKES = {
    "leaves the loop": ("for _ in run.shards(): break", "left before training was complete"),
    "computes nothing": ("for _ in run.shards(): pass", "call run.backward(loss) once"),
    "computes twice": (
        "for (x,) in run.shards(): [run.backward(model(x).sum()) for _ in range(2)]",
        "called twice for one batch",
    ),
    "gives no loss": ("for (x,) in run.shards(): run.backward(model(x))", "of shape (4, 2)"),
    "has no graph": (
        "for (x,) in run.shards(): run.backward(model(x).sum().detach())",
        "without a graph",
    ),
    "steps itself": (
        "for (x,) in run.shards():\n  run.backward(model(x).sum())\n  optimizer.step()",
        "leave out optimizer.step()",
    ),
    "goes backward itself": (
        "for (x,) in run.shards():\n  model(x).sum().backward()\n  run.backward(model(x).sum())",
        "leave out loss.backward()",
    ),
    "makes a parameter": (
        "for (x,) in run.shards():\n run.backward(model(x).sum())\n model.x = torch.nn.PReLU()",
        "'x.weight' was made or removed since",
    ),
    "steps the scheduler": (
        "for (x,) in run.shards():\n run.backward(model(x).sum())\n lrs.step()",
        "give scheduler=… to muster.torch.join()",
    ),
    "steps a registered scheduler": (
        f"run.register(slow=(slow := type(lrs)(optimizer, 100)))\n{BACKWARD}\n slow.step()",
        "give scheduler=… to muster.torch.join()",
    ),
    "clips in the body": (
        f"{BACKWARD}\n torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "train.py:14: .grad is used after run.backward(loss)",
    ),
    "reads a gradient": (f"{BACKWARD}\n print(model.weight.grad.norm())", "run.before_step"),
    "goes backward again": (f"{BACKWARD}\n model(x).sum().backward()", "add losses up"),
    "scales the loss": (
        "for (x,) in run.shards(): run.backward(torch.amp.GradScaler('cpu').scale(model(x).sum()))",
        "the loss is multiplied by 65536",
    ),
    "accumulates": (
        "for at, (x,) in enumerate(run.shards()):\n if at % 2: run.backward(model(x).sum())",
        "a larger batch_size takes the place of accumulating",
    ),
    "joins twice": (
        "muster.torch.join(model, optimizer, data=data)",
        "train.py:12: muster.torch.join() was called before in this process",
    ),
    "has a stream": (
        "class Stream(torch.utils.data.IterableDataset): __iter__ = None\n"
        + JOIN.format("Stream()"),
        "read its shards by index",
    ),
    "has a loader": (
        JOIN.format("torch.utils.data.DataLoader(data)"),
        "such as the one that a DataLoader is made of",
    ),
    "has a DistributedSampler": (
        JOIN.format("data, sampler=torch.utils.data.DistributedSampler(data, 2, 0)"),
        "leave it out",
    ),
    "counts in a buffer": (
        "model.register_buffer('seen', torch.zeros((), dtype=torch.int64))\n"
        + JOIN.format("data")
        + "\nfor (x,) in run.shards():\n model.seen += len(x)\n run.backward(model(x).sum())",
        "the buffer 'seen' (torch.int64) changes in the forward pass",
    ),
    "counts in extra state": (
        "torch.nn.Linear.get_extra_state = lambda self: {'seen': self.__dict__.get('seen', 0)}\n"
        "torch.nn.Linear.set_extra_state = lambda self, state: None\n"
        + JOIN.format("data")
        + "\nfor (x,) in run.shards():\n model.__dict__['seen'] = 1\n"
        " run.backward(model(x).sum())",
        "what a get_extra_state of the model returns changes in the forward pass",
    ),
    "counts epochs itself": (
        "for _ in range(2):\n  for (x,) in run.shards(): run.backward(model(x).sum())",
        "leave out the loop over epochs",
    ),
    "has a negative weight": (
        "for (x,) in run.shards(): run.backward(model(x).sum(), weight=-1)",
        "the weight in step 0, virtual shard 0 is -1.0",
    ),
    "has no weight": (
        "for (x,) in run.shards(): run.backward(model(x).sum(), weight=0)",
        "all weights of step 0 are 0",
    ),
    "stops too early": ("run.stop()", "inside the loop"),
    "registers a function": ("run.register(f=print)", "which has no state_dict"),
    "registers a name twice": (
        "run.register(x=optimizer)\nrun.register(x=torch.optim.SGD(model.parameters(), lr=1))",
        "take another name",
    ),
    "steps a scheduler twice": (
        f"{JOIN.format('data, scheduler=lrs')}\nrun.after_step(lrs.step)\n{BACKWARD}",
        "give it to run.register() instead",
    ),
    "freezes statistics in a hook": (
        "model.norm = torch.nn.BatchNorm1d(2, affine=False)\n"
        + JOIN.format("data")
        + f"\nrun.after_step(model.norm.eval)\n{BACKWARD.replace('.sum', '.norm')}",
        "a hook has put the module 'norm' in evaluation mode",
    ),
    "makes a buffer": (
        f"{BACKWARD}\n model.register_buffer('late', torch.ones(2))",
        "the buffer 'late' was made after muster.torch.join()",
    ),
    "grows a buffer": (
        "model.register_buffer('table', torch.ones(2))\n"
        + JOIN.format("data")
        + f"\n{BACKWARD}\n model.table = torch.ones(4)",
        "'table' had the shape (2,) at muster.torch.join(), and now it has (4,)",
    ),
    "keeps state beside its parameters": (
        "optimizer.state['calls'] = 0\n" + JOIN.format("data"),
        "SGD keeps 'calls' beside the state of its parameters",
    ),
    "reports in the body": ("for _ in run.shards(): run.report(val_loss=1)", "or after the loop"),
    "reports the loss": ("run.report(loss=1)", "another name, such as val_loss"),
    "steps an optimizer of its own": (
        f"own = torch.optim.Adam([it := torch.ones(1)])\n{BACKWARD}\n own.step()",
        "an optimizer that muster.torch.join() does not have, Adam, steps in the loop",
    ),
    "names an optimizer that is not there": (
        "for (x,) in run.shards(): run.backward(model(x).sum(), of=model)",
        "names one of the optimizers that muster.torch.join() has",
    ),
    "names one optimizer of two": (
        f"{PAIR} run.backward(a(x).sum(), of=oa)\n run.backward(b(x).sum())",
        "without of=…, for all losses, they step together",
    ),
    "goes on in another order": (
        f"{PAIR} run.backward(b(x).sum(), of=ob)\n run.backward(a(x).sum(), of=oa)",
        "give them there in the order of the body",
    ),
    "gives two weights in one turn": (
        f"{PAIR} run.backward(a(x).sum(), of=oa)\n run.backward(a(x).sum(), 9, of=oa)",
        "is 9.0 and was 4.0 for an earlier loss",
    ),
    "names the optimizer of another model": (
        f"{PAIR} run.backward(a(x).sum(), of=oa)\n run.backward(a(x).sum(), of=ob)",
        "name the optimizer of the model that it trains",
    ),
    "reads a gradient of a turn": (
        f"{TURNS}\n torch.nn.utils.clip_grad_norm_(b.parameters(), 1)",
        ".grad is used after run.backward(loss)",
    ),
    "clips gradients of turns in a hook": (
        TURNS.replace("for (x,)", "run.before_step(print)\nfor (x,)"),
        "give it to register_step_pre_hook of one optimizer",
    ),
    "makes a NaN": (
        "for (x,) in run.shards(): run.backward(model(x).sum() * float('nan'))",
        "not finite",
    ),
}


FORKS = """
import gc, os, runpy, sys
from pathlib import Path
import torch
import muster.torch
torch.compiler.reset()  # loads what each optimizer would load
gc.freeze()  # forks leave these objects, and their pages, as they are
for directory in sys.argv[1:]:
    if os.fork() == 0:
        os.chdir(directory)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), descriptor)
        sys.argv = ["train.py"]
        runpy.run_path("train.py", run_name="__main__")
        sys.exit()
    Path(directory, "code").write_text(str(os.waitstatus_to_exitcode(os.wait()[1])))
"""
"""Runs the script of each directory in a process of its own; torch is loaded once for all."""


def run_scripts(directory: Path, scripts: Mapping[str, str]) -> dict[str, tuple[int, str, str]]:
    """Return exit code, stdout and stderr of each script by its name."""
    places = {name: directory / str(number) for number, name in enumerate(scripts)}
    for name, place in places.items():
        place.mkdir(exist_ok=True)
        (place / "train.py").write_text(scripts[name])
    command = [sys.executable, "-W", "ignore", "-c", FORKS, *map(str, places.values())]
    subprocess.run(command, cwd=directory, env={}, check=True)
    return {
        name: (
            int((it / "code").read_text()),
            *((it / end).read_text() for end in ("stdout", "stderr")),
        )
        for name, it in places.items()
    }


def test_a_mistake_in_the_loop_is_one_sentence(tmp_path: Path) -> None:
    begins = {True: SMALL.rpartition("run =")[0], False: SMALL}
    scripts = {name: begins["run = " in body] + body for name, (body, _) in MISTAKES.items()}
    for name, (code, _, stderr) in run_scripts(tmp_path, scripts).items():
        assert code == 1, name
        (line,) = stderr.splitlines()
        assert line.startswith("muster: "), name
        assert MISTAKES[name][1] in line, name


def test_a_batch_without_weight_adds_nothing(tmp_path: Path) -> None:
    scripts = {
        loss: f"{SMALL}\nfor (x,) in run.shards():\n"
        f"  if x[0, 0] > 0:\n    run.backward({loss}, weight=0)\n"
        "  else:\n    run.backward(model(x).square().mean())\n"
        "assert run.step == 2\nprint('sha256', model.weight.sum().item())\n"
        for loss in ("0 * model(x).sum()", "model(x).sum() * float('nan')")
    }
    ends = run_scripts(tmp_path, scripts).values()
    assert [code for code, _, _ in ends] == [0, 0]
    (line,) = {stdout.splitlines()[-1] for _, stdout, _ in ends}
    assert "nan" not in line


def test_an_optimizer_that_gets_no_loss_is_named(tmp_path: Path) -> None:
    begin = SMALL.rpartition("run =")[0]
    scripts = {
        "none": f"{begin}{PAIR} run.backward(a(x).sum(), of=oa)\n run.backward(a(x).sum(), of=oa)",
        "its own": f"{begin}{TURNS}",
    }
    warnings = {name: stderr for name, (_, _, stderr) in run_scripts(tmp_path, scripts).items()}
    assert "SGD, number 2 of the optimizers of join(), got no loss" in warnings["none"]
    assert warnings["its own"] == ""


TRAINS = "for (x,) in run.shards(): run.backward(model(x).sum())"
DIES_ONCE = """
import os, pathlib, time
seen = [0]
@run.after_step
def count():
    seen[0] += 1
    time.sleep(0.02)
    died = pathlib.Path("died")
    if run.rank == 1 and seen[0] == 5 and not died.exists():
        died.touch()
        os._exit(3)
for (x,) in run.shards():
    run.backward(model(x).square().mean() * (1 + seen[0] / 10_000))
"""
KNOWS_ITS_RANK = """
import time
for (x,) in run.shards():
    time.sleep(0.005)
    run.backward(model(x).square().mean() * (1 + run.rank / 10))
"""
ALL_DIE_ONCE = """
import os, pathlib
seen = [0]
@run.before_step
def die():
    died = pathlib.Path(f"died{run.rank}")
    if run.step == 4 and not died.exists():
        died.touch()
        os._exit(3)
@run.after_step
def count():
    seen[0] += 1
for (x,) in run.shards():
    run.backward(model(x).square().mean() * (1 + seen[0] / 10_000))
"""
CACHES = """
class Cached(torch.utils.data.Dataset):
    def __init__(self): self.items = {}
    def __len__(self): return 64
    def __getitem__(self, index):
        return (self.items.setdefault(index, torch.randn(4)),)

run = muster.torch.join(model, optimizer, data=Cached(), batch_size=32, epochs=4)
"""
MISTAKES_OF_JOBS = {
    "caches what was drawn": (
        CACHES + TRAINS,
        {"min_workers": 2},
        "a cache of items with random changes",
    ),
    "knows its rank": (KNOWS_ITS_RANK, {"epochs": 2000}, "and for run.rank or run.is_main"),
    "keeps what a restart loses": (
        ALL_DIE_ONCE,
        {"epochs": 2000, "checkpoint_every": 2},
        "differently from the process that saved the state: the loss depends on",
    ),
    "keeps what a hook changes": (DIES_ONCE, {"epochs": 2000}, "neither in run.values"),
    "leaves the loop": (MISTAKES["leaves the loop"][0], {}, "left before training was complete"),
    "is not elastic": (
        "",
        {"mode": "independent"},
        "submit or run it with --elastic",
    ),
    "raises after the loop": (
        f"{TRAINS}\nraise OSError('disk full')",
        {},
        "the script raised OSError: disk full after the loop, and so did its process",
    ),
    "changes one rank": (
        "run.after_step(lambda: model.weight.data.add_(run.is_main))\n" + TRAINS,
        {"min_workers": 2},
        (
            "the same values differ a second time: the state of 2 of 2 workers differs from that "
            "of the others at the same step, in model.weight: stopped before the next step. What a "
            "hook changes has to change on every rank"
        ),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES_OF_JOBS)
def test_a_mistake_fails_the_job(installation: Installation, tmp_path: Path, mistake: str) -> None:
    body, fields, sentence = MISTAKES_OF_JOBS[mistake]
    begins = {True: SMALL.rpartition("run =")[0], False: SMALL}
    (tmp_path / "train.py").write_text(begins["run = " in body] + body)
    fields = {**fields, "command": [sys.executable, "train.py"], "working_dir": str(tmp_path)}
    job_id = submit(installation, 2, spare_ranks=1, **fields)
    assert sentence in installation.fail(job_id)["message"]


RESTARTED = """
import os, pathlib, signal

died = pathlib.Path("died")
os.environ |= {"MUSTER_JOB_UID": "uid", "CHECKPOINT_EVERY": "3"}
pathlib.Path("helper.py").touch()
import helper
SMALL
heat = [1.0]
run.values["heat"] = 1.0

@run.before_step
def die():
    if run.step == 4 and not died.exists():
        died.touch()
        (witness,) = pathlib.Path("checkpoints").glob("*/*3.g*/witness.json")
        BETWEEN
        os.kill(os.getpid(), KILL)

@run.after_step
def cool():
    heat[0] *= 0.9
    run.values["heat"] *= 0.9

for (x,) in run.shards():
    run.backward(model(x).square().mean() * HEAT)
print("sha256", model.weight.sum().item())
"""
CARRIED, PURE = "heat[0]", 'run.values["heat"]'
OTHERS = "(bias, weight) differently from the process that saved the state"
RESTARTS = {
    # What the body reads, what happens before the first process ends, and how. What the second
    # one says.
    "undisturbed": (PURE, "pass", 0, ""),
    "killed": (PURE, "pass", 9, ""),
    "stopped": (PURE, "pass", 15, ""),
    "carried": (CARRIED, "pass", 9, f"computed virtual shard 0 of step 3 {OTHERS}"),
    "carried and stopped": (CARRIED, "pass", 15, f"computed virtual shard 0 of step 5 {OTHERS}"),
    "edited": (
        CARRIED,
        "pathlib.Path('helper.py').write_text('1')",
        9,
        "in step 3 is not compared with before: ",
    ),
}


def test_a_restart_is_compared_with_the_process_that_saved(tmp_path: Path) -> None:
    scripts = {}
    for name, (heat, between, number, _) in RESTARTS.items():
        words = {"HEAT": heat, "BETWEEN": between, "KILL": str(number)}
        words["SMALL"] = SMALL.replace("32)", "32, epochs=4)")
        scripts[name] = re.sub("|".join(words), lambda it, words=words: words[it[0]], RESTARTED)
    run_scripts(tmp_path, scripts)
    models = set()
    for name, (code, stdout, stderr) in run_scripts(tmp_path, scripts).items():
        heat, _, _, words = RESTARTS[name]
        assert code == int(OTHERS in words), (name, stderr)
        assert words in stderr, name
        if heat is PURE:
            assert stderr == "", name
            models.add(stdout.rpartition("sha256")[2])
    assert len(models) == 1


CHECK = [sys.executable, "-P", "-m", "muster", "check", "--python", sys.executable, "-n", "2"]


def check(directory: Path, noise: str, small: str = SMALL) -> subprocess.CompletedProcess[str]:
    """Run `muster check` on a small script that adds `noise` to its batches."""
    script = directory / "train.py"
    script.write_text(
        f"{small.replace('32)', '32, check=False)')}\nown = torch.Generator().manual_seed(1)\n"
        f"for (x,) in run.shards():\n    run.backward(model(x + {noise}).square().mean())\n"
        "open('exported', 'w')"
    )
    words = [*CHECK, "--steps", "2", str(script)]
    return subprocess.run(words, cwd=directory, capture_output=True, text=True, check=False)


def test_a_check_of_a_pure_script_finds_the_same_bits(tmp_path: Path) -> None:
    done = check(tmp_path, "torch.randn(x.shape)")
    assert (done.returncode, done.stdout.count("the same bits")) == (0, 4), done
    assert "2 ranks, one of them killed in step 2: the same bits" in done.stdout
    assert not (tmp_path / "exported").exists()


def test_a_check_names_the_step_that_differs(tmp_path: Path) -> None:
    done = check(tmp_path, "torch.randn(x.shape, generator=own)")
    assert done.returncode == 1, done
    assert "resumed from there: differs from step 2 on: model.bias, model.weight" in done.stdout
    assert "docs/pytorch.md" in done.stderr


def test_a_check_of_a_script_without_a_seed_says_so(tmp_path: Path) -> None:
    seeded_later = SMALL.replace("manual_seed(0)", "seed()").replace(
        "data =", "torch.manual_seed(0)\ndata ="
    )
    done = check(tmp_path, "0", seeded_later)
    assert (done.returncode, done.stdout.count("differs from step 1 on")) == (1, 2), done
    assert "Call torch.manual_seed(0) before" in done.stderr


STARTS, TRAINS_NOW = "tmp/muster-check-*/*", "trains"
ENDS_OF_CHECKS = [
    (signal.SIGTERM, STARTS),
    (signal.SIGTERM, TRAINS_NOW),
    (signal.SIGKILL, TRAINS_NOW),
]


@pytest.mark.parametrize(("number", "moment"), ENDS_OF_CHECKS)
def test_a_check_that_a_signal_ends_leaves_nothing(
    tmp_path: Path, number: signal.Signals, moment: str
) -> None:
    script, temporary = tmp_path / "train.py", tmp_path / "tmp"
    script.write_text(
        f"import pathlib, time\n{SMALL.replace('32)', '32, epochs=9999)')}\n"
        "for (x,) in run.shards():\n    pathlib.Path('trains').touch()\n"
        "    time.sleep(0.01)\n    run.backward(model(x).square().mean())\n"
    )
    temporary.mkdir()
    began = subprocess.Popen(
        [*CHECK, "--steps", "9999", str(script)],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
    )

    def left() -> list[int]:
        return [pid for pid in all_pids() if bytes(tmp_path) in read_environment(pid)]

    try:
        await_value(lambda: [*tmp_path.glob(moment)], lambda: f"{left()}", 200)
        began.send_signal(number)
    finally:
        began.send_signal(signal.SIGTERM)  # another one, as `timeout` sends it
    _, said = began.communicate()
    if number == signal.SIGKILL:
        await_value(lambda: not left(), lambda: f"{left()}")
        return
    assert began.returncode == 130, said
    assert not left()
    assert not [*temporary.glob("muster-check-*")]
