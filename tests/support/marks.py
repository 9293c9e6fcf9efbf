"""Parameters of tests with a mark."""

from typing import Any

import pytest


def long(*values: object) -> Any:  # noqa: ANN401  pytest's type of it is private
    """Return the parameters of a variant that is left to `make long`."""
    return pytest.param(*values, marks=pytest.mark.long)
