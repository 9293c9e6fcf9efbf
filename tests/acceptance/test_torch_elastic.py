"""Scripts with `muster.torch` through the whole system: ranks that die, join and leave."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from muster.checkpoints.manifest import CheckpointName
from muster.contracts.settings.names import SPARE_RANK
from muster.contracts.settings.paths import checkpoints_of_job
from muster.host.containment import tagged_processes
from stress.torch_schedules import MODELS, Schedule, TorchJob
from tests.support.installation import (
    Installation,
    await_value,
    is_over,
    is_running,
    newest_checkpoint,
    pids,
    restarts,
)
from tests.support.marks import long
from tests.support.torch_jobs import (
    EXAMPLE,
    SMALL,
    digest_of,
    digests,
    has_saved_once,
    run_scripts,
    submit,
)

pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # a dozen starts with torch

SEED = 60  # of a schedule that begins with two ranks


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each script prints if it is typed, without any service."""
    env = {"PAUSE_SECONDS": "0", "DIES": "-1", "PAUSE": "0", "WORKERS": "0"}
    scripts = {
        name: f"import os\nos.environ |= {env}\n{script}" for name, script in SCRIPTS.items()
    }
    ends = run_scripts(tmp_path_factory.mktemp("alone"), scripts)
    return {name: digest_of(stdout) for name, (_, stdout, _) in ends.items()}


def test_ranks_that_die_join_and_leave_change_no_bit(
    installation: Installation, alone: dict[str, str]
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
    assert digests(installation, job_id, 3) == {alone["example"]}
    audit = installation.request("GET", f"/jobs/{job_id}/audit").json()
    assert audit["exactly_once"] is True


def test_a_stopped_job_is_resumed_with_the_same_bits(
    installation: Installation, alone: dict[str, str]
) -> None:
    first = submit(installation, 2, pause=0.03)
    installation.wait_until(first, has_saved_once)
    installation.stop(first)
    seen = installation.wait_until(first, lambda seen: seen["status"] == "STOPPED")
    assert 0 < seen["last_checkpoint_step"] < 160
    second = submit(installation, 1, resume_from=first)
    installation.complete(second)
    assert digests(installation, second, 1) == {alone["example"]}
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


@pytest.mark.long
@pytest.mark.parametrize("model", ["resnet", "gpt"])
def test_killed_ranks_of_a_larger_model_change_no_bit(
    installation: Installation, model: str
) -> None:
    shortened = replace(MODELS[model], pause_seconds=0.05, fields={"epochs": 2})
    alone = TorchJob(installation, shortened, world_size=1, spare_ranks=0).end()
    assert Schedule(installation, shortened, SEED, kills=1, scalings=0).run() == alone


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
    installation: Installation, tmp_path: Path, alone: dict[str, str]
) -> None:
    found = {}
    for before, world_size in (("", 2), (STAGED, 2)):
        (tmp_path / "train.py").write_text(before + BUFFERS)
        command = [sys.executable, "train.py"]
        fields = {"command": command, "min_workers": world_size, "working_dir": str(tmp_path)}
        job_id = submit(installation, world_size, **fields)
        installation.complete(job_id)
        found[before, world_size] = frozenset(digests(installation, job_id, world_size))
    assert {*found.values()} == {frozenset({alone["buffers"]})}, found


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
    installation: Installation, tmp_path: Path, alone: dict[str, str]
) -> None:
    (tmp_path / "train.py").write_text(EVERYTHING)
    command = [sys.executable, "-W", "ignore", "train.py"]
    fields = {"command": command, "working_dir": str(tmp_path)}
    env = {"WORKERS": "2", "PAUSE": "0.4"}
    killed = submit(installation, 2, env=env, **fields)
    installation.wait_until(killed, has_saved_once)
    installation.kill(killed, 0)
    installation.wait_until(killed, restarts(1))
    installation.stop(killed)
    seen = installation.wait_until(killed, lambda seen: seen["status"] == "STOPPED")
    assert seen["last_checkpoint_step"] == seen["step"] < 31
    resumed = submit(installation, 2, env={"WORKERS": "2"}, resume_from=killed, **fields)
    assert installation.complete(resumed)["step"] == 31
    assert digests(installation, resumed, 2) == {alone["everything"]}
    audit = installation.request("GET", f"/jobs/{resumed}/audit").json()
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


OPTIMIZERS = {"in turns": GAN, "together": TOGETHER}
SCRIPTS = {
    "example": EXAMPLE.read_text(),
    "buffers": BUFFERS,
    "everything": EVERYTHING,
    "compressed": GAN.replace("epochs=6,", 'epochs=6, compression="int8",'),
    **OPTIMIZERS,
}


@pytest.mark.parametrize("name", ["in turns", long("together")])
def test_several_optimizers_survive_kills_and_a_stop(
    installation: Installation, tmp_path: Path, alone: dict[str, str], name: str
) -> None:
    (tmp_path / "train.py").write_text(OPTIMIZERS[name])
    command = [sys.executable, "-W", "ignore", "train.py"]
    fields = {"command": command, "working_dir": str(tmp_path)}
    env = {"DIES": "1", "PAUSE": "0.4", "WORKERS": "0"}
    killed = submit(installation, 2, env=env, min_workers=2, **fields)
    installation.wait_until(killed, restarts(1, rank=1))
    installation.stop(killed)
    seen = installation.wait_until(killed, lambda seen: seen["status"] == "STOPPED")
    assert 5 <= seen["last_checkpoint_step"] == seen["step"] < 18
    env = {"DIES": "-1", "PAUSE": "0", "WORKERS": "1"}
    resumed = submit(installation, 3, env=env, min_workers=3, resume_from=killed, **fields)
    assert installation.complete(resumed)["step"] == 18
    assert digests(installation, resumed, 3) == {alone[name]}
    audit = installation.request("GET", f"/jobs/{resumed}/audit").json()
    assert [epoch["samples"] for epoch in audit["epochs"]] == [80] * 6


def test_compression_of_a_job_is_that_of_its_script(
    installation: Installation, tmp_path: Path, alone: dict[str, str]
) -> None:
    """In turns, and with the buffers of a model, which stay whole."""
    (tmp_path / "train.py").write_text(GAN)
    command = [sys.executable, "-W", "ignore", "train.py"]
    env = {"DIES": "1", "PAUSE": "0", "WORKERS": "0"}
    fields = {"command": command, "working_dir": str(tmp_path), "compression": "int8"}
    job_id = submit(installation, 2, env=env, min_workers=2, **fields)
    assert installation.complete(job_id)["step"] == 18
    assert digests(installation, job_id, 2) == {alone["compressed"]}
    assert alone["compressed"] != alone["in turns"]


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
