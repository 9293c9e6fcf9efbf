"""The Trainer of Lightning as a job: progress, a save before the end, and exact resume.

    import muster
    from muster.torch.lightning import MusterCallback

    callback = MusterCallback(muster.join())
    trainer = Trainer(callbacks=[callback])
    trainer.fit(model, loader, ckpt_path=callback.resume_from, weights_only=True)

The trainer writes and reads its own checkpoints; the callback says when, and which of them is
complete. Lightning does not save the state of the random generators, so the callback does.
"""

import signal
import sys
from pathlib import Path
from typing import Any, Final

from torch.utils.data.distributed import DistributedSampler

from muster.run import Run
from muster.torch.saved import SavedCheckpoints, random_state, set_random_state

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Checkpoint
    from lightning.pytorch.utilities import CombinedLoader
except ImportError as error:
    raise ImportError(
        "muster.torch.lightning needs Lightning: install it into the environment of this script "
        "(pip install lightning)"
    ) from error


class MusterCallback(Checkpoint):
    """Saves every `checkpoint_every` steps of the job, at the end, and when the run should stop.

    After SIGTERM the process ends inside `fit` with exit code 0, once its state is saved. The files
    lie in `default_root_dir` of the trainer, below ``muster/<job id>``. What Lightning saves before
    a validation or the end of an epoch resumes after it, so the callback saves a step later there.
    """

    def __init__(self, run: Run) -> None:
        """Raises a `CheckpointError` that says what to do."""
        self.run: Final = run
        self._saved: Final = SavedCheckpoints(run)
        self._is_due = False
        self._handler: Final = signal.getsignal(signal.SIGTERM)

    @property
    def resume_from(self) -> str | None:
        """The newest complete checkpoint, for `ckpt_path`; None at first."""
        return self._saved.newest_path

    def on_train_start(self, trainer: Trainer, _: LightningModule) -> None:
        if problem := _problem(trainer):
            raise ValueError(f"MusterCallback cannot resume this run exactly: {problem}")
        # Lightning's handler ends the training before its state is saved.
        signal.signal(signal.SIGTERM, self._handler)
        self.run.steps_done = trainer.global_step
        if trainer.estimated_stepping_batches != float("inf"):
            self.run.total_steps = int(trainer.estimated_stepping_batches)
        newest = self._saved.newest
        if newest is not None and newest["step"] == trainer.global_step:
            set_random_state(newest["random"])

    def on_train_batch_end(
        self,
        trainer: Trainer,
        _: LightningModule,
        outputs: Any,  # noqa: ANN401  of the user's training_step
        __: Any,  # noqa: ANN401
        batch_idx: int,
    ) -> None:
        if trainer.global_step == self.run.steps_done:
            return  # in the middle of accumulated gradients, which are not saved
        while self.run.steps_done < trainer.global_step:
            self.run.step()
            self._is_due |= self.run.should_checkpoint
        if trainer.global_step % max(1, trainer.log_every_n_steps) == 0:
            loss = {"loss": outputs["loss"]} if isinstance(outputs, dict) else {}
            metrics = loss | trainer.callback_metrics
            self.run.report(**{name: float(value) for name, value in metrics.items()})
        stops = trainer.strategy.reduce_boolean_decision(self.run.should_stop, all=False)
        if (stops or self._is_due) and not _validates_or_ends(trainer, batch_idx):
            self._save(trainer)
            if stops:
                sys.exit(0)

    def on_train_end(self, trainer: Trainer, _: LightningModule) -> None:
        if not trainer.should_stop:  # resumed, it would not stop early again
            self._save(trainer)
        self.run.is_complete = True

    def _save(self, trainer: Trainer) -> None:
        self._is_due = False
        if not self._saved.has(trainer.global_step):
            directory = Path(trainer.default_root_dir, "muster", self.run.settings.job_id)
            path = directory / f"step-{trainer.global_step}.ckpt"
            trainer.save_checkpoint(path)
            self._saved.add(str(path), random=random_state())


def _problem(trainer: Trainer) -> str | None:
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    if not all(
        hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") for loader in loaders
    ):
        return (
            "a DataLoader of torch begins each epoch anew; use StatefulDataLoader of torchdata, or "
            "another loader with state_dict and load_state_dict"
        )
    holders = [*loaders, *(getattr(loader, "batch_sampler", None) for loader in loaders)]
    if any(isinstance(getattr(holder, "sampler", None), DistributedSampler) for holder in holders):
        return (
            "DistributedSampler shuffles anew; set use_distributed_sampler=False, and use a loader "
            "with state_dict that gives each rank its part"
        )
    if trainer.num_training_batches == 1:
        return "an epoch has one batch; make the batches smaller"
    if trainer.enable_validation and trainer.val_check_batch in (None, 1):
        return "set val_check_interval to a number of batches above 1, or to a part of the epoch"
    return None


def _validates_or_ends(trainer: Trainer, batch_idx: int) -> bool:
    """Whether a validation or the end of the epoch may come before the next batch."""
    if trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches:
        return True
    is_counted_on = trainer.check_val_every_n_epoch is None
    batches = trainer.fit_loop.total_batch_idx if is_counted_on else batch_idx
    validates = trainer.enable_validation and (batches + 1) % trainer.val_check_batch == 0
    return bool(trainer.should_stop or validates)
