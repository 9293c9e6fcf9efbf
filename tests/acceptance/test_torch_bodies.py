"""Bodies that are no function of state and batch are refused, and others are not."""

import json
import subprocess
import sys
from collections.abc import Iterable

import pytest

pytest.importorskip("torch")

from tests.support.torch_bodies import IMPURE, PURE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def refusals(bodies: Iterable[type]) -> dict[str, str]:
    """Why each body was refused, or ""; one process trains all, since torch takes long to load."""
    names = [it.__name__ for it in bodies]
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.torch_bodies", *names]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(ended.stdout))


def test_a_pure_or_unchecked_body_is_not_refused() -> None:
    assert refusals(PURE) == {it.__name__: "" for it in PURE}


def test_an_impure_body_is_refused_with_the_cause() -> None:
    found = refusals(IMPURE)
    causes = {it.__name__: cause for it, cause in IMPURE.items()}
    assert {name: causes[name] in found[name] or found[name] for name in causes} == dict.fromkeys(
        causes, True
    )
