import re
from pathlib import Path

from muster.contracts import errors

ROOT = Path(errors.__file__).parents[2]
PACKAGES = ("muster", "store", "api", "coordinator", "worker", "cli")


def test_the_tree_that_is_drawn_is_the_tree_there_is() -> None:
    branches = {
        branch
        for package in PACKAGES
        for module in (ROOT / package).rglob("*.py")
        for branch in re.findall(r"^class (\w+)\(MusterError\)", module.read_text(), re.MULTILINE)
    }
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")
    assert sorted(drawn) == sorted(branches)
