import re
from pathlib import Path

from api import problems
from muster.contracts import errors

ROOT = Path(errors.__file__).parents[2]
PACKAGES = ("muster", "store", "api", "coordinator", "worker", "cli")


def test_the_tree_of_problems_is_drawn_whole() -> None:
    found = set()
    branches = {"Problem"}
    modules = [module.read_text() for module in (ROOT / "api").rglob("*.py")]
    while branches:
        parents = "|".join(branches)
        branches = {
            branch
            for text in modules
            for branch in re.findall(rf"^class (\w+)\((?:{parents})\)", text, re.MULTILINE)
        }
        found |= branches
    assert set(re.findall(r"[├└]── (\w+)", problems.__doc__ or "")) == found


def test_the_tree_that_is_drawn_is_the_tree_there_is() -> None:
    branches = {
        branch
        for package in PACKAGES
        for module in (ROOT / package).rglob("*.py")
        for branch in re.findall(r"^class (\w+)\(MusterError\)", module.read_text(), re.MULTILINE)
    }
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")
    assert sorted(drawn) == sorted(branches)
