"""The systemd unit of docs/operations.md."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


ANALYZE = shutil.which("systemd-analyze")


@pytest.mark.slow
@pytest.mark.skipif(ANALYZE is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    (unit,) = re.findall(r"```ini\n(.*?)```", PAGE.read_text(), re.DOTALL)
    file = tmp_path / "muster.service"
    file.write_text(unit.replace("%h/muster/.venv/bin/muster", sys.executable))
    checked = subprocess.run(
        [str(ANALYZE), "--user", "verify", str(file)],
        env={"XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, "")
