"""Debian's Chromium, driven by Playwright, which may not be installed."""

from pathlib import Path
from typing import Any, TypeAlias

CHROMIUM = Path("/usr/bin/chromium")
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-dev-shm-usage",
]
Browser: TypeAlias = Any
Page: TypeAlias = Any


def launch(playwright: Any) -> Browser:  # noqa: ANN401
    return playwright.chromium.launch(executable_path=str(CHROMIUM), args=OPTIONS)
