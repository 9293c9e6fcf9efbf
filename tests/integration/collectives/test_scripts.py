"""What a newcomer types: the first lines of the page, and the example."""

import re
import subprocess
import sys
from pathlib import Path

from muster.host.ports import free_port

ROOT = Path(__file__).parents[3]


def test_page_begins_with_ten_lines_that_work(tmp_path: Path) -> None:
    page = (ROOT / "docs/collectives.md").read_text()
    script = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    (tmp_path / "mean.py").write_text(script.replace("29500", str(free_port())))
    assert script.count("\n") <= 10
    ranks = [
        subprocess.Popen([sys.executable, tmp_path / "mean.py", rank, "2"], stdout=subprocess.PIPE)
        for rank in ("0", "1")
    ]
    printed = [rank.communicate(timeout=60)[0].decode() for rank in ranks]
    assert printed == [f"rank {rank} of 2: [0.5 0.5 0.5]\n" for rank in (0, 1)]


def test_hybrid_sharding_holds_equal_bits() -> None:
    script = ROOT / "examples/hybrid_sharding.py"
    printed = subprocess.check_output([sys.executable, script], text=True)
    assert printed.startswith("hosts hold the same bits: True\n")
