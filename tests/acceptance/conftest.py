"""Shared installations, a small data set, and the results of undisturbed jobs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chromium import CHROMIUM, Browser, Page, launch
from tests.support.installation import (
    SLOTS,
    Installation,
    await_value,
    lent,
    write_small_dataset,
)
from tests.support.terminals import Terminal
from tests.support.undisturbed import UndisturbedRuns


@pytest.fixture(scope="session")
def dataset_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_dataset(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture(scope="session")
def _shared(tmp_path_factory: pytest.TempPathFactory, dataset_dir: Path) -> Iterator[Installation]:
    root = tmp_path_factory.mktemp("shared")
    with Installation(root, DATASET_DIR=str(dataset_dir)) as installation:
        yield installation


@pytest.fixture
def installation(_shared: Installation) -> Iterator[Installation]:
    """An installation that tests share, one after the other: they may end its services."""
    yield from lent(_shared)


@pytest.fixture(scope="session")
def _narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with Installation(tmp_path_factory.mktemp("narrow"), MUSTER_SLOTS=str(SLOTS)) as installation:
        yield installation


@pytest.fixture
def narrow(_narrow: Installation) -> Iterator[Installation]:
    """An installation with few slots and no data set."""
    yield from lent(_narrow)


@pytest.fixture(scope="session")
def undisturbed(_shared: Installation) -> UndisturbedRuns:
    """Run each kind of job once without faults; return its digests."""
    return UndisturbedRuns(_shared)


@pytest.fixture
def terminal(tmp_path: Path, dataset_dir: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path, dataset_dir)
    yield terminal
    for process in terminal.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    await_value(lambda: not terminal.left_running(), lambda: f"{terminal.left_running()} are left")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs: pip install playwright")
    if not CHROMIUM.exists():
        pytest.skip("needs: apt-get install chromium")
    with playwright.sync_playwright() as running:
        playwright.expect.set_options(timeout=60_000)
        chromium = launch(running)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Browser, installation: Installation) -> Iterator[Page]:
    """A tab that fails the test if it asks another host, or a script has an error."""
    tab = browser.new_page(base_url=installation.url)
    foreign: list[str] = []
    errors: list[str] = []
    tab.on("request", lambda it: it.url.startswith("http://127.0.0.1:") or foreign.append(it.url))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    yield tab
    assert (foreign, errors) == ([], [])
    tab.close()
