"""The address of the page is printed, and opened only where a browser can be seen."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from cli.main import app
from cli.services import status

URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("words", "environment", "opened"),
    [
        ([], {"DISPLAY": ":0"}, f"{URL}/ui/"),
        (["dig"], {"WAYLAND_DISPLAY": "wayland-0"}, f"{URL}/ui/jobs/digits"),
        (["dig"], {}, None),
    ],
)
def test_page_opens_where_there_is_a_display(
    words: list[str],
    environment: dict[str, str],
    opened: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = SimpleNamespace(url=URL, job=lambda _: SimpleNamespace(id="digits"))
    seen: list[str] = []
    monkeypatch.setattr(status, "connected", lambda: nullcontext(client))
    monkeypatch.setattr(status.webbrowser, "open", seen.append)  # type: ignore[attr-defined]
    monkeypatch.setattr(status.sys, "platform", "linux")  # type: ignore[attr-defined]
    shown = {"DISPLAY": None, "WAYLAND_DISPLAY": None, **environment}
    result = CliRunner().invoke(app, ["open", *words], env=shown)
    assert result.output == f"{URL}/ui/" + ("jobs/digits\n" if words else "\n")
    assert seen == ([opened] if opened else [])
