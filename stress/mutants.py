"""Measures how many small defects the unit tests detect, by mutation of a sample.

    python stress/mutants.py [path ...] [--count 100] [--seed 0] [--jobs 2] [--root DIR]

Each mutant changes one comparison, operator, constant, condition or return value of one module, in
a copy of the tree. It is caught if a unit test of its package fails, or does not end in time. The
sample is a function of paths, count and seed. The exit code is 0 even if mutants survive.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

PATHS = ["coordinator/decide", "muster/checkpoints", "muster/contracts", "muster/training"]
TESTS = {
    "coordinator": ["tests/unit/coordinator"],
    "muster/checkpoints": [
        "tests/unit/checkpoints",
        "tests/promises",
        "tests/integration/checkpoints",
    ],
    "muster/collectives": ["tests/unit/collectives", "tests/promises"],
    "muster/contracts": ["tests/unit/contracts", "tests/unit/coordinator"],
    "muster/datasets": ["tests/unit/datasets"],
    "muster/training": ["tests/unit/training"],
}
"""The tests of a package, by the start of its path."""

PAIRS = "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, And Or, Add Sub, Mult FloorDiv"
SWAPS = {
    getattr(ast, old): getattr(ast, new)
    for pair in PAIRS.split(", ")
    for old, new in (pair.split(), reversed(pair.split()))
}


class Mutant(NamedTuple):
    path: str
    line: int
    before: str
    after: str
    source: str


def mutate(node: ast.AST) -> bool:
    """Change `node` in place; False if it is not a place to mutate."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        node.ops[0] = SWAPS[type(node.ops[0])]()
    elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in SWAPS:
        node.op = SWAPS[type(node.op)]()
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        node.value = not node.value
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        node.value += 1
    elif isinstance(node, ast.Return) and node.value and not isinstance(node.value, ast.Constant):
        node.value = ast.Constant(None)
    elif isinstance(node, ast.If | ast.IfExp) and not isinstance(node.test, ast.Compare):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    else:
        return False
    return True


def sites(root: Path, paths: list[str]) -> Iterator[tuple[str, int]]:
    """Yield every place to mutate: a module, and the index of a node in `ast.walk` order."""
    for path in paths:
        base = root / path
        for module in sorted(base.rglob("*.py")) if base.is_dir() else [base]:
            for index, node in enumerate(list(ast.walk(ast.parse(module.read_text())))):
                if mutate(node):
                    yield str(module.relative_to(root)), index


def mutant(root: Path, path: str, index: int) -> Mutant:
    tree = ast.parse((root / path).read_text())
    node = list(ast.walk(tree))[index]
    before = ast.unparse(node).split("\n")[0][:70]
    mutate(node)
    after = ast.unparse(ast.fix_missing_locations(node)).split("\n")[0][:70]
    return Mutant(path, node.lineno, before, after, ast.unparse(tree))


def tests_pass(tree: Path, path: str, timeout_seconds: float) -> bool:
    """Run the unit tests of a module's package in `tree`, up to the first failure."""
    prefix = max((start for start in TESTS if path.startswith(start)), key=len)
    folders = [folder for folder in TESTS[prefix] if (tree / folder).is_dir()]
    command = [sys.executable, "-m", "pytest", "-xq", "-m", "not slow", "-p", "no:cacheprovider"]
    environ = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        options = {"cwd": tree, "env": environ, "timeout": timeout_seconds, "capture_output": True}
        return subprocess.run([*command, *folders], check=False, **options).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120)
    parser.add_argument("--root", type=Path, default=Path.cwd())
    options = parser.parse_args()
    paths = options.paths or [p for p in PATHS if (options.root / p).exists()]
    found = list(sites(options.root, paths))
    chosen = random.Random(options.seed).sample(found, min(options.count, len(found)))  # noqa: S311
    mutants = [mutant(options.root, *site) for site in chosen]
    print(f"{len(mutants)} of {len(found)} mutants")
    with tempfile.TemporaryDirectory() as directory:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache")
            trees.put(shutil.copytree(options.root, Path(directory, str(number)), ignore=ignored))

        tree = trees.get()
        for prefix in TESTS:
            path = next((one.path for one in mutants if one.path.startswith(prefix)), None)
            if path and not tests_pass(tree, path, options.timeout):
                sys.exit(f"the tests of {path} fail without a mutant")
        trees.put(tree)

        def survives(one: Mutant) -> bool:
            tree = trees.get()
            original = (tree / one.path).read_text()
            (tree / one.path).write_text(one.source)
            survived = tests_pass(tree, one.path, options.timeout)
            (tree / one.path).write_text(original)
            trees.put(tree)
            if survived:
                print(f"survived {one.path}:{one.line}  {one.before}  ->  {one.after}", flush=True)
            return survived

        with ThreadPoolExecutor(options.jobs) as pool:
            survivors = list(pool.map(survives, mutants))
    print(f"{len(mutants) - sum(survivors)} caught, {sum(survivors)} survived")


if __name__ == "__main__":
    main()
