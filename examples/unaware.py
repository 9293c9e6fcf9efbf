"""A script that has never heard of Muster. It is supervised as a process.

    {"command": ["python", "examples/unaware.py"], "world_size": 2}

Its place comes in the variables that torchrun would set; what it prints is its log; exit code 0
means done, anything else means: start me again.
"""

import os
import time

rank = int(os.environ.get("RANK", "0"))
world_size = int(os.environ.get("WORLD_SIZE", "1"))
starts_before = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

print(f"rank {rank} of {world_size}, started {starts_before} times before", flush=True)
for step in range(1, 21):
    time.sleep(0.1)
    print(f"rank {rank} step {step}", flush=True)
