import pkgutil
from importlib import import_module

import cli
from cli import misuse


def test_the_tree_that_is_drawn_is_the_one_there_is() -> None:
    for module in pkgutil.iter_modules(cli.__path__, "cli."):
        import_module(module.name)
    there = {f"{kind.__name__} {kind.__module__}" for kind in misuse.Misuse.__subclasses__()}
    drawn = [
        line.split()[1:] for line in str(misuse.__doc__).splitlines() if line.startswith(("├", "└"))
    ]
    assert {f"{name} {path[:-3].replace('/', '.')}" for name, path in drawn} == there
