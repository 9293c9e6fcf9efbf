"""Everyone can use the page: names of controls, contrast, a narrow screen."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chromium import Browser, Page
from tests.support.installation import Installation

pytestmark = pytest.mark.timeout(300)

CONTROLS = ("button", "link", "textbox", "combobox", "spinbutton", "checkbox", "slider")

CONTRASTS = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => v / 255).map((v) => (
      v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (element) => {
    for (let it = element; it; it = it.parentElement) {
      const [r, g, b, a = 1] = parse(getComputedStyle(it).backgroundColor);
      if (r !== undefined && a > 0.99) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].filter((it) => it.nodeType === 3 && it.data.trim());
    if (!text.length || !element.checkVisibility()) continue;
    const style = getComputedStyle(element), isSvg = element instanceof SVGElement;
    const [a, b] = [light(parse(isSvg ? style.fill : style.color)), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${element.outerHTML.slice(0, 90)}`);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def paths(
    browser: Browser,  # noqa: ARG001
    dataset_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, list[str]]]:
    """Views of an installation that has a job in every important state."""
    root = tmp_path_factory.mktemp("access")
    with Installation(root, DATASET_DIR=str(dataset_dir)) as installation:
        done = installation.submit(world_size=2, epochs=1)
        installation.complete(done)
        failed = installation.submit(world_size=1, command=["python", "-c", "raise SystemExit(64)"])
        installation.fail(failed)
        jobs = [f"/ui/jobs/{job_id}" for job_id in (done, failed)]
        views = ["/ui/", "/ui/?status=QUEUED", "/ui/login", *jobs, f"{jobs[1]}/logs"]
        views += ["/ui/service", "/ui/submit", f"{jobs[0]}/checkpoints"]
        views.append(f"/ui/compare?job={done}&job={failed}")
        yield installation.url, views


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_contrast_and_controls_have_names(
    browser: Browser,
    paths: tuple[str, list[str]],
    scheme: str,
) -> None:
    url, views = paths
    tab: Page = browser.new_page(base_url=url, color_scheme=scheme)
    for path in views:
        answer = tab.goto(path)
        assert answer.ok, path
        assert tab.evaluate(CONTRASTS) == [], path
        tree = tab.locator("body").aria_snapshot()
        unnamed = [line for line in tree.splitlines() if re.match(r"\s*- (\w+)[:]?$", line)]
        controls = [line for line in unnamed if line.strip(" -:") in CONTROLS]
        assert controls == [], f"{path}:\n{tree}"
    tab.close()


def test_nothing_is_wider_than_a_phone(
    browser: Browser,
    paths: tuple[str, list[str]],
) -> None:
    url, views = paths
    tab: Page = browser.new_page(base_url=url, viewport={"width": 360, "height": 700})
    for path in views:
        tab.goto(path)
        wide = tab.evaluate("document.documentElement.scrollWidth")
        assert wide <= 360, path
    tab.close()
