"""Ports that nobody listens on."""

import pytest

from muster import ports


def test_another_port_is_never_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = iter([5000, 5000, 5001])
    monkeypatch.setattr(ports, "free_port", lambda _host: next(offered))
    assert ports.another_port(5000) == 5001
