"""Prints what Muster depends on, as a CycloneDX document: the versions of requirements.lock.

    .venv/bin/python .ci/sbom.py

What only the `dev` extra needs is left out. The same lock gives the same bytes: there is no time
and no serial number. The hashes of the files are in the lock.
"""

import json
import re
import tomllib
from pathlib import Path

from muster.contracts.interpreter import VERSION

ROOT = Path(__file__).resolve().parents[1]
OURS = "muster-train"


def bom() -> dict[str, object]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [words for name, words in project["optional-dependencies"].items() if name != "dev"]
    direct = {_name(word) for words in [project["dependencies"], *extras] for word in words}
    versions, needed_by = _locked((ROOT / "requirements.lock").read_text())
    found = direct & versions.keys()  # torch is not locked
    while more := {it for it in versions if needed_by[it] & found} - found:
        found |= more
    purls = {name: f"pkg:pypi/{name}@{versions[name]}" for name in sorted(found)}
    purl = f"pkg:pypi/{OURS}@{VERSION}"
    ours = {"type": "library", "name": OURS, "version": VERSION, "bom-ref": purl, "purl": purl}
    ours |= {"licenses": [{"license": {"id": project["license"]}}]}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": ours},
        "components": [
            {"type": "library", "name": name, "version": versions[name], "bom-ref": it, "purl": it}
            for name, it in purls.items()
        ],
        "dependencies": [
            {"ref": purl, "dependsOn": [purls[it] for it in sorted(direct & found)]},
            *(
                {"ref": it, "dependsOn": [purls[o] for o in purls if name in needed_by[o]]}
                for name, it in purls.items()
            ),
        ],
    }


def _locked(lock: str) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Return the version of each package, and which packages need it, from the comments of uv."""
    versions: dict[str, str] = {}
    needed_by: dict[str, set[str]] = {}
    name = ""
    for line in lock.splitlines():
        if pinned := re.match(r"([\w.-]+)(?:\[[^\]]*\])?==([\w.!+-]+)", line):
            name = _name(pinned[1])
            versions[name], needed_by[name] = pinned[2], set()
        elif via := re.match(r"\s+#\s+(?:via\s+)?([\w.-]+)", line):
            needed_by[name].add(_name(via[1]))
    return versions, needed_by


def _name(requirement: str) -> str:
    """Return the normalized name of a package."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()


if __name__ == "__main__":
    print(json.dumps(bom(), indent=1))
