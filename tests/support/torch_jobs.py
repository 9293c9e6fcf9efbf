"""Jobs with `muster.torch`: small scripts, how they are submitted, and what they print."""

import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from tests.support.installation import Installation, Seen

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


BACKWARD = "for (x,) in run.shards():\n run.backward(model(x).sum())"
PAIR = """a, b = (torch.nn.Linear(4, 2) for _ in range(2))
oa, ob = (torch.optim.SGD(it.parameters(), lr=0.1) for it in (a, b))
run = muster.torch.join([a, b], [oa, ob], data=data, batch_size=32)
for (x,) in run.shards():
"""
TURNS = f"{PAIR} run.backward(a(x).sum(), of=oa)\n run.backward(b(x).sum(), of=ob)"
JOIN = "run = muster.torch.join(model, optimizer, data={})"  # takes the place of that of SMALL


FORKS = """
import gc, os, runpy, sys
from pathlib import Path
import torch
import muster.torch
from muster.runtime.exit_report import exit_process, print_error
torch.compiler.reset()  # loads what each optimizer would load
gc.freeze()  # forks leave these objects, and their pages, as they are
for directory in sys.argv[1:]:
    if os.fork() == 0:
        os.chdir(directory)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), descriptor)
        sys.argv = ["train.py"]
        code = 0
        try:
            runpy.run_path("train.py", run_name="__main__")
        except BaseException as error:
            code = print_error(error)
        exit_process(code)  # tearing torch down takes longer than most of these scripts
    Path(directory, "code").write_text(str(os.waitstatus_to_exitcode(os.wait()[1])))
"""
"""Runs the script of each directory in a process of its own; torch is loaded once for all."""


def run_scripts(
    directory: Path, scripts: Mapping[str, str], twice: Collection[str] = ()
) -> dict[str, tuple[int, str, str]]:
    """Return exit code, stdout and stderr of each script by its name; of some, the second time."""
    places = {name: directory / str(number) for number, name in enumerate(scripts)}
    for name, place in places.items():
        place.mkdir(exist_ok=True)
        (place / "train.py").write_text(scripts[name])
    command = [sys.executable, "-W", "ignore", "-c", FORKS, *map(str, places.values())]
    command += [str(places[name]) for name in twice]
    subprocess.run(command, cwd=directory, env={}, check=True)
    return {
        name: (
            int((it / "code").read_text()),
            *((it / end).read_text() for end in ("stdout", "stderr")),
        )
        for name, it in places.items()
    }
