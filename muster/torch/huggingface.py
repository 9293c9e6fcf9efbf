"""The Trainer of Hugging Face as a job: progress, a save before the end, and exact resume.

    import muster
    from muster.torch.huggingface import MusterCallback

    callback = MusterCallback(muster.join())
    trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume_from)

The trainer writes and reads its own checkpoints in `output_dir`; the callback says when, and which
of them is complete.
"""

import sys
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from muster.run import Run
from muster.torch.saved import SavedCheckpoints

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise ImportError(
        "muster.torch.huggingface needs the Trainer of Hugging Face: install it into the "
        "environment of this script (pip install transformers accelerate)"
    ) from error


class MusterCallback(TrainerCallback):
    """Saves every `checkpoint_every` steps of the job, at the end, and when the run should stop.

    After SIGTERM the process ends inside `train` with exit code 0, once its state is saved.
    """

    def __init__(self, run: Run) -> None:
        """Raises a `CheckpointError` that says what to do."""
        self.run: Final = run
        self._saved: Final = SavedCheckpoints(run)
        self._is_stopping = False

    @property
    def resume_from(self) -> str | None:
        """The newest complete checkpoint, for `resume_from_checkpoint`; None at first."""
        return self._saved.newest_path

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, _: TrainerControl, **__: object
    ) -> None:
        if args.save_only_model or args.save_total_limit is not None:
            raise ValueError(
                "MusterCallback resumes from complete checkpoints and deletes old ones itself: "
                "leave out save_only_model and save_total_limit (keep_last of the job is the limit)"
            )
        self.run.steps_done, self.run.total_steps = state.global_step, state.max_steps

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self.run.step()
        self._is_stopping = _stops(wanted=self.run.should_stop, device=args.device)
        wanted = self._is_stopping or self.run.should_checkpoint or control.should_training_stop
        control.should_save |= wanted and _can_resume(state)

    def on_epoch_end(
        self, _: TrainingArguments, state: TrainerState, control: TrainerControl, **__: object
    ) -> None:
        if self._saved.has(state.global_step):
            control.should_save = False  # it would write over the files that are recorded

    def on_save(
        self, args: TrainingArguments, state: TrainerState, _: TrainerControl, **__: object
    ) -> None:
        if _can_resume(state):
            # No rank reads the files of another before they are written.
            _stops(wanted=False, device=args.device)
            path = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            self._saved.add(str(path), state.best_model_checkpoint)
            if self._is_stopping:
                sys.exit(0)

    def on_train_end(self, *_: object, **__: object) -> None:
        self.run.is_complete = True

    def on_log(self, *_: object, logs: dict[str, Any] | None = None, **__: object) -> None:
        found = {k: v for k, v in (logs or {}).items() if isinstance(v, int | float)}
        self.run.report(**found)


def _can_resume(state: TrainerState) -> bool:
    """Whether the trainer, resumed from here, takes no step more than it should.

    It takes one after `max_steps` if these end within an epoch. What was saved before is used then.
    """
    return bool(state.global_step < state.max_steps or state.epoch >= state.num_train_epochs)


def _stops(*, wanted: bool, device: torch.device) -> bool:
    """Return whether any rank of the gang wants to stop; waits for all of them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return wanted
    ranks = torch.tensor(int(wanted), device=device)
    dist.all_reduce(ranks)
    return bool(ranks.item())
