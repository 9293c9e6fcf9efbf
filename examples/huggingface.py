"""A script with the Trainer of Hugging Face: kill it at any moment, and it ends with the same bits.

    python examples/huggingface.py                      # by itself
    muster run examples/huggingface.py
    muster submit -- python examples/huggingface.py     # as a job

Needs transformers and accelerate. The model is a small GPT-2 with random weights, which learns to
count; nothing is downloaded.
"""

import hashlib
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import muster
from muster.torch.huggingface import MusterCallback

set_seed(0)
sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
rows = [(torch.arange(16) + start) % 64 for start in range(256)]
dataset = [{"input_ids": row, "labels": row} for row in rows]

run = muster.join()
callback = MusterCallback(run)
print(f"resumes from {callback.resume_from or 'nothing'}", flush=True)
arguments = TrainingArguments(
    output_dir=f"output/{run.settings.job_id}",  # one for each job
    num_train_epochs=float(os.environ.get("EPOCHS", "3")),
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    logging_steps=5,
    save_strategy="no",  # the callback says when: every `checkpoint_every` steps of the job
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[callback])
trainer.train(resume_from_checkpoint=callback.resume_from)

# From here on training is complete.
weights = b"".join(it.numpy(force=True).tobytes() for it in model.state_dict().values())
print(f"sha256 {hashlib.sha256(weights).hexdigest()}", flush=True)
