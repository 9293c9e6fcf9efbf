"""A gang: ranks that meet once at MASTER_ADDR:MASTER_PORT, and anew when one of them is gone.

    muster run -n 4 examples/gang.py 0.2
    {"command": ["python", "examples/gang.py", "0.2"], "world_size": 4, "restart_scope": "gang"}

Nothing here knows Muster: what torchrun sets is enough, and torch.distributed meets in this way.
Every step adds up one number of each rank and takes so many seconds; rank 0 saves, and all go on
from there. Kill any rank. On several hosts rank 0 has to stay on its own, or save on a shared disk.
"""

import json
import os
import socket
import struct
import sys
import time
from pathlib import Path

STEPS = 100
NUMBER = struct.Struct("<q")
PAUSE_SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 0.05

rank = int(os.environ.get("RANK", "0"))
world_size = int(os.environ.get("WORLD_SIZE", "1"))
meeting = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
name = os.environ.get("TORCHELASTIC_RUN_ID", "alone")
saved = Path(os.environ.get("CHECKPOINT_DIR", "checkpoints")) / f"gang-{name}.json"


def meet():
    """Return the connections of this rank: rank 0 has one to each, the others one to rank 0."""
    if rank == 0:
        with socket.create_server(meeting, backlog=world_size) as server:
            return [server.accept()[0] for _ in range(world_size - 1)]
    while True:
        try:
            return [socket.create_connection(meeting)]
        except ConnectionRefusedError:  # rank 0 is still starting
            time.sleep(0.05)


def receive(peer):
    content = peer.recv(NUMBER.size, socket.MSG_WAITALL)
    if len(content) < NUMBER.size:
        raise ConnectionError("a rank is gone")
    return NUMBER.unpack(content)[0]


def add_up(number, peers):
    """Return the sum of what all ranks have given."""
    if rank == 0:
        number += sum(receive(peer) for peer in peers)
    for peer in peers:
        peer.sendall(NUMBER.pack(number))
    return number if rank == 0 else receive(peers[0])


def save(step, total):
    saved.parent.mkdir(parents=True, exist_ok=True)
    draft = saved.with_suffix(".draft")
    draft.write_text(json.dumps([step, total]))
    draft.replace(saved)


peers = meet()
# The hosts may share no directory: what rank 0 has saved it tells the others.
begun, total = json.loads(saved.read_text()) if rank == 0 and saved.exists() else (0, 0)
begun, total = add_up(begun, peers), add_up(total, peers)
print(f"one of {world_size} ranks at port {meeting[1]} goes on from step {begun}", flush=True)
for step in range(begun + 1, STEPS + 1):
    total += add_up(step * (rank + 1), peers)
    if rank == 0 and step % 5 == 0:
        save(step, total)
    time.sleep(PAUSE_SECONDS)
print(f"has the sum {total}", flush=True)
