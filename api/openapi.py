"""Writes what this service says of itself: ``python -m api.openapi > docs/openapi.json``.

The file is committed, so that a change of the interface is seen where changes are looked at.
"""

import json
import sys
from importlib.metadata import version
from typing import Any

from api.app import described


def document() -> dict[str, Any]:
    """Return the OpenAPI document of this version."""
    return described(version("muster-train")).openapi()


def text() -> str:
    """Return the document as it is committed."""
    return json.dumps(document(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
