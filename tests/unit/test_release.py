"""What a release promises beside its tests: an import without effects, its changelog, its parts."""

import json
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

from muster.contracts.interpreter import VERSION

ROOT = Path(__file__).parents[2]

IMPORT = """
import sys

sys.path.insert(0, sys.argv[1])
seen = []
sys.addaudithook(lambda event, arguments: seen.append((event, arguments)))
import muster

for event, arguments in tuple(seen):
    is_module = event == "open" and str(arguments[0]).endswith((".py", ".pyc"))
    if not is_module and event.partition(".")[0] in {"open", "os", "socket", "subprocess"}:
        print(event, arguments)
"""


def test_import_opens_its_modules_and_nothing_else() -> None:
    words = [sys.executable, "-I", "-B", "-c", IMPORT, str(ROOT)]
    seen = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    assert [line for line in seen if not line.startswith("os.listdir")] == []  # as any import


def test_the_changelog_names_this_version_and_its_date() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(re.escape(VERSION) + r" \(\d{4}-\d\d-\d\d\)", headings[1])


def test_the_list_of_dependencies_has_those_of_the_package_and_no_tools() -> None:
    words = [sys.executable, str(ROOT / ".ci" / "sbom.py")]
    made = [subprocess.run(words, check=True, capture_output=True).stdout for _ in range(2)]
    assert made[0] == made[1]
    bom = json.loads(made[0])
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    refs = {it["bom-ref"]: it["name"] for it in bom["components"]}
    ours, *others = bom["dependencies"]
    assert ours["ref"] == f"pkg:pypi/muster-train@{VERSION}"
    needed = {
        re.split(r"[^\w.-]", it)[0].lower().replace(".", "-")
        for it in requires("muster-train") or []
        if not re.search("extra == '(dev|torch)'", it)
    }
    assert needed <= {refs[it] for it in ours["dependsOn"]}
    assert {it["ref"] for it in others} == refs.keys()
    assert not {"pytest", "mypy", "moto"} & {*refs.values()}


def test_files_that_pages_for_maintainers_name_exist() -> None:
    pages = [*(ROOT / "docs" / "internals").glob("*.md"), ROOT / "CONTRIBUTING.md"]
    named = re.compile(r"`((?:muster|api|cli|coordinator|database|docs|tests|worker)/[\w/.-]+)`")
    missing = {
        (page.name, path)
        for page in pages
        for path in named.findall(page.read_text())
        if not (ROOT / path).exists() and path != "muster/_services"  # of the wheel
    }
    assert missing == set()
