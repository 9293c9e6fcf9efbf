"""Muster: the one name that a training script imports.

Attributes load lazily: ``import muster.contracts`` runs this file first and must stay cheap, and a
launcher must be able to pin threads before numpy is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from muster.contracts.interpreter import VERSION

if TYPE_CHECKING:
    from muster.client.client import Client as Client
    from muster.run import Run as Run
    from muster.run import join as join

__version__ = VERSION
__all__ = ["Client", "Run", "join"]


def __getattr__(name: str) -> Any:  # noqa: ANN401  a module attribute can be anything
    if name not in __all__:
        raise AttributeError(f"module 'muster' has no attribute {name!r}")
    module = "muster.client.client" if name == "Client" else "muster.run"
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return __all__
