"""What cannot be elastic in a script with `muster.torch` is one sentence."""

import re
import sys
from pathlib import Path

import pytest

from tests.support.installation import Installation
from tests.support.torch_jobs import BACKWARD, JOIN, PAIR, SMALL, TURNS, run_scripts, submit

pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # a dozen starts with torch

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
    "compresses as it cannot": (
        'run = muster.torch.join(model, optimizer, data=data, compression="topk")',
        "join(compression='topk'): use int8, bf16, fp16 or",
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


WEIGHTLESS = {
    loss: f"\nfor (x,) in run.shards():\n"
    f"  if x[0, 0] > 0:\n    run.backward({loss}, weight=0)\n"
    "  else:\n    run.backward(model(x).square().mean())\n"
    "assert run.step == 2\nprint('sha256', model.weight.sum().item())\n"
    for loss in ("0 * model(x).sum()", "model(x).sum() * float('nan')")
}
WITHOUT_LOSS = {
    "one has none": f"{PAIR} run.backward(a(x).sum(), of=oa)\n run.backward(a(x).sum(), of=oa)",
    "each has its own": TURNS,
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """How each script ends; all are forks of one process, which has loaded torch."""
    begins = {True: SMALL.rpartition("run =")[0], False: SMALL}
    bodies = {name: body for name, (body, _) in MISTAKES.items()} | WEIGHTLESS | WITHOUT_LOSS
    scripts = {name: begins["run = " in body] + body for name, body in bodies.items()}
    scripts |= {name: restarted(*how) for name, (*how, _) in RESTARTS.items()}
    return run_scripts(tmp_path_factory.mktemp("scripts"), scripts, twice=RESTARTS)


def test_a_mistake_in_the_loop_is_one_sentence(ends: dict[str, tuple[int, str, str]]) -> None:
    for name, (_, sentence) in MISTAKES.items():
        code, _, stderr = ends[name]
        assert code == 1, name
        (line,) = stderr.splitlines()
        assert line.startswith("muster: "), name
        assert sentence in line, name


def test_a_batch_without_weight_adds_nothing(ends: dict[str, tuple[int, str, str]]) -> None:
    found = [ends[loss] for loss in WEIGHTLESS]
    assert [code for code, _, _ in found] == [0, 0]
    (line,) = {stdout.splitlines()[-1] for _, stdout, _ in found}
    assert "nan" not in line


def test_an_optimizer_that_gets_no_loss_is_named(ends: dict[str, tuple[int, str, str]]) -> None:
    warnings = {name: ends[name][2] for name in WITHOUT_LOSS}
    assert "SGD, number 2 of the optimizers of join(), got no loss" in warnings["one has none"]
    assert warnings["each has its own"] == ""


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
        {"epochs": 2000, "checkpoint_every": 2, "spare_ranks": 1},
        "differently from the process that saved the state: the loss depends on",
    ),
    "keeps what a hook changes": (
        DIES_ONCE,
        {"epochs": 2000, "spare_ranks": 1},
        "neither in run.values",
    ),
    "is not elastic": (
        "",
        {"mode": "independent", "world_size": 1},
        "submit or run it with --elastic",
    ),
    "raises after the loop": (
        f"{TRAINS}\nraise OSError('disk full')",
        {"world_size": 1},
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
    job_id = submit(installation, **{"world_size": 2, **fields})
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
    "edited": (  # not compared where it starts again, and refused in its last step
        CARRIED,
        "pathlib.Path('helper.py').write_text('1')",
        9,
        "in step 3 is not compared with before: ",
    ),
}


def restarted(heat: str, between: str, number: int) -> str:
    """Return the script of one of the restarts."""
    words = {"HEAT": heat, "BETWEEN": between, "KILL": str(number)}
    words["SMALL"] = SMALL.replace("32)", "32, epochs=4)")
    return re.sub("|".join(words), lambda found: words[found[0]], RESTARTED)


def test_a_restart_is_compared_with_the_process_that_saved(
    ends: dict[str, tuple[int, str, str]],
) -> None:
    models = set()
    for name, (heat, _, _, words) in RESTARTS.items():
        code, stdout, stderr = ends[name]
        assert code == int(heat is CARRIED), (name, stderr)
        assert words in stderr, name
        if heat is PURE:
            assert stderr == "", name
            models.add(stdout.rpartition("sha256")[2])
    assert len(models) == 1
