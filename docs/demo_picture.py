"""Draw what the demo printed: ``muster demo | python -P docs/demo_picture.py > docs/demo.svg``."""

import io
import re
import sys
from typing import Final

from rich.console import Console
from rich.text import Text

STYLES: Final = {
    r"^\d\. .*|.*same bits\.$": "bold",
    r"kill -9.*|.*SIGKILL\).*": "red",
    r"PATCH .*": "cyan",
    r"(?<=━ ).*|━+": "blue",
    r"(?<=   )[0-9a-f]{64}|every sample exactly once.*": "green",
}


def main() -> None:
    lines = sys.stdin.read().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("4."))
    last = next(number for number, line in enumerate(lines) if line.endswith("same bits."))
    console = Console(record=True, width=96, file=io.StringIO())
    for line in lines[first : last + 1]:
        text = Text(line, no_wrap=True, overflow="ellipsis")
        for pattern, style in STYLES.items():
            text.highlight_regex(pattern, style)
        console.print(text)
    picture = console.export_svg(title="muster demo")
    # Without the fonts that rich would load from a server of others.
    sys.stdout.write(re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL))


main()
