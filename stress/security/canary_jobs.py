"""Jobs with secrets that end in every way, and programs that print their secrets."""

import sys
from collections.abc import Mapping
from pathlib import Path

Fields = Mapping[str, object]

CHECK = """
import hashlib, os, sys
print(*sys.argv)
for name in sorted(os.environ):
    if name.startswith("SECRET_"):
        print(name, hashlib.sha256(os.environ[name].encode()).hexdigest(), flush=True)
"""

BLURT = """
import json, os
told = " ".join(v for n, v in sorted(os.environ.items()) if n.startswith("SECRET_"))
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    json.dump({"message": {"message": f"ValueError: {told}"}}, file)
raise ValueError(told)
"""

STAND_STILL = """
import os, signal
import muster
muster.join()
os.kill(os.getpid(), signal.SIGSTOP)
"""

IGNORE = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"

PROGRAM = """
import os
from muster.training.classifier import Classifier

class Careless(Classifier):
    def update(self, state, gradients, step):
        if step == 7:
            raise ValueError(" ".join(v for n, v in os.environ.items() if n.startswith("SECRET_")))
        return super().update(state, gradients, step)
"""

CARELESS = ("crashes", "raises")
"""Jobs that print their secrets themselves."""


def jobs(directory: Path, secrets: Mapping[str, str], decoy: str) -> Mapping[str, Fields]:
    """Return jobs by id, their programs in `directory`; all names contain the decoy."""
    (directory / "canary_program.py").write_text(PROGRAM)
    (lost := directory / "lost_program").write_text("#!/no/such/interpreter")
    lost.chmod(0o755)
    trained = {"mode": "synchronous", "world_size": 2, "working_dir": str(directory)}
    described: Mapping[str, Fields] = {
        "succeeds": {"command": [*_python(CHECK), decoy], "world_size": 2},
        "crashes": {"command": _python(BLURT), "max_restarts": 1},
        "cannot-be-found": {"command": [str(lost)]},
        "cannot-start": {"command": ["true"], "secrets": {"A": "env:HOME"}},
        "hangs": {"command": _python(STAND_STILL), "heartbeat_timeout": 1, "max_hangs": 0},
        "does-not-stop": {"command": [*_python(IGNORE), decoy], "restart_scope": "gang"},
        "trains": {**trained, "program": "canary_program.py:Classifier", "checkpoint_every": 5},
        "raises": {**trained, "program": "canary_program.py:Careless", "checkpoint_every": 5},
    }
    common = {"mode": "independent", "world_size": 1, "secrets": dict(secrets), "name": decoy}
    return {job_id: {**common, **fields} for job_id, fields in described.items()}


def _python(words: str) -> list[str]:
    return [sys.executable, "-c", words]
