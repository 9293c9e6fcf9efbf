"""Scripts with the Trainers of Hugging Face and Lightning that are stopped or killed at any moment.

``python -m stress.preemption [SIGNALS] [SEED] [--kind KILL]`` trains a model with each of them, by
hand, and signals each so many times, at any moment after the first step of an attempt; with several
kinds, ``TERM,KILL``, in turn. After a SIGTERM the script has to exit with 0 and go on after its
very last step, after a SIGKILL with one that it has saved. Both models must end with the bits of an
undisturbed run. Run as a script, this file is one attempt.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from typing import Any

# Torch and its libraries are imported in an attempt: the harness itself must start without them.
# ruff: noqa: PLC0415
import muster
from stress.runner import Report, chance, main, say

LIBRARIES = ("huggingface", "lightning")
CHECKPOINT_EVERY = 4
BATCHES = 20  # an epoch
STEPS_PER_SIGNAL = 20
STEP_SECONDS = 0.02
STEPS_BEFORE = 12
"""Most steps of an attempt before the signal; three of them are saved."""

WAIT_SECONDS = 0.06
"""Longest time from a step to the signal: it may come while the state is being saved."""


def run(directory: Path, signals: int = 20, seed: int = 0, *, kind: str = "TERM") -> Report:
    """Signal both scripts so many times, and compare their models with undisturbed ones."""
    report = Report()
    numbers = [signal.Signals[f"SIG{name}"] for name in kind.split(",")]
    epochs = 1 + signals * STEPS_PER_SIGNAL // BATCHES
    with ThreadPoolExecutor(len(LIBRARIES)) as pool:  # a thread for each
        for library, faults, lost in pool.map(
            lambda it: _disturbed(directory, it, epochs, signals, numbers, chance((seed, it))),
            LIBRARIES,
        ):
            report.faults += faults
            steps = f"{lost} of {epochs * BATCHES} steps repeated"
            report.lines.append(f"{library}: {signals} times {kind}, {steps}")
    return report


def _disturbed(
    directory: Path,
    library: str,
    epochs: int,
    signals: int,
    numbers: Sequence[int],
    draw: random.Random,
) -> tuple[str, list[str], int]:
    """Return the library, what must not be, and how many steps were taken again."""
    faults: list[str] = []
    last = lost = allowed = 0
    for attempt, number in zip(range(signals), cycle(numbers), strict=False):
        with _script(directory, library, "disturbed", epochs) as process:
            lines = _lines(process)
            begun = int(next(lines)["begins"])
            for _ in range(draw.randint(1, STEPS_BEFORE)):
                step = int(next(lines)["step"])
            time.sleep(draw.uniform(0, WAIT_SECONDS))
            process.send_signal(number)
            seen = [step, *(int(line["step"]) for line in lines if line["step"])]
            code = process.wait()
        assert seen[-1] < epochs * BATCHES, "give it more to do"
        if attempt and not 0 <= last - begun <= allowed:
            faults.append(f"{library} has taken {last} steps and goes on after step {begun}")
        if code != (0 if number == signal.SIGTERM else -number):
            faults.append(f"{library} has exited with {code}")
        lost += max(0, last - begun)
        last, allowed = seen[-1], 0 if number == signal.SIGTERM else CHECKPOINT_EVERY + 1
        say(f"{library} went from step {begun} to step {last}")
    found = _digest(directory, library, "disturbed", epochs)
    wanted = _digest(directory, library, "calm", epochs)
    if found != wanted:
        faults.append(f"{library} ends with the model {found}, not {wanted}")
    return library, faults, lost


def _digest(directory: Path, library: str, name: str, epochs: int) -> str:
    """Let the script come to its end, and return what it prints of its model."""
    with _script(directory, library, name, epochs) as process:
        *_, last = _lines(process)
        assert process.wait() == 0
    return last["sha256"]


@contextmanager
def _script(
    directory: Path, library: str, name: str, epochs: int
) -> Iterator[subprocess.Popen[str]]:
    environ = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "JOB_ID": f"{library}-{name}",
        "CHECKPOINT_EVERY": str(CHECKPOINT_EVERY),
        "STEP_SECONDS": str(0 if name == "calm" else STEP_SECONDS),
    }
    command = [sys.executable, __file__, library, str(epochs)]
    log = directory / f"{library}-{name}.log"
    with (
        log.open("a") as errors,
        subprocess.Popen(
            command, cwd=directory, env=environ, stdout=-1, stderr=errors, text=True
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def _lines(process: subprocess.Popen[str]) -> Iterator[re.Match[str]]:
    """Yield what the script tells of itself."""
    assert process.stdout is not None
    pattern = r"(?:begins after (?P<begins>\d+)|step (?P<step>\d+)|sha256 (?P<sha256>\w+))\n"
    for line in process.stdout:
        if found := re.fullmatch(pattern, line):
            yield found


def _report(step: int) -> None:
    print(f"step {step}", flush=True)
    time.sleep(float(os.environ["STEP_SECONDS"]))


def _huggingface(epochs: int) -> Any:
    """Train with the Trainer of Hugging Face, and return the model."""
    import torch
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    from muster.torch.huggingface import MusterCallback

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            _report(state.global_step)

    set_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    rows = torch.randint(64, (4 * BATCHES, 16))
    callback = MusterCallback(muster.join())
    print(f"begins after {callback.run.steps_done}", flush=True)
    arguments = TrainingArguments(
        output_dir=f"output/{callback.run.settings.job_id}",
        num_train_epochs=epochs,
        per_device_train_batch_size=4,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Steps(), callback])
    trainer.train(resume_from_checkpoint=callback.resume_from)
    return model


def _lightning(epochs: int) -> Any:
    """Train with the Trainer of Lightning, and return the model."""
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
    from torch.utils.data import TensorDataset
    from torchdata.stateful_dataloader import StatefulDataLoader

    from muster.torch.lightning import MusterCallback

    class Model(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            layers = torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
            self.layers = torch.nn.Sequential(*layers)

        def training_step(self, batch: Any, _: int) -> Any:
            return (self.layers(batch[0]).squeeze() - batch[0].sum(1)).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Steps(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            _report(trainer.global_step)

    seed_everything(0)
    model = Model()
    data = TensorDataset(torch.randn(4 * BATCHES, 16))
    callback = MusterCallback(muster.join())
    print(f"begins after {callback.run.steps_done}", flush=True)
    trainer = Trainer(
        max_epochs=epochs,
        callbacks=[Steps(), callback],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
    )
    loader = StatefulDataLoader(data, batch_size=4, shuffle=True)
    trainer.fit(model, loader, ckpt_path=callback.resume_from, weights_only=True)
    return model


def _train(library: str, epochs: int) -> None:
    model = {"huggingface": _huggingface, "lightning": _lightning}[library](epochs)
    weights = b"".join(it.numpy(force=True).tobytes() for it in model.state_dict().values())
    print(f"sha256 {sha256(weights).hexdigest()}", flush=True)


if __name__ == "__main__":
    if "STEP_SECONDS" in os.environ:
        _train(sys.argv[1], int(sys.argv[2]))
    else:
        main(run)
