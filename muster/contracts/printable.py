"""What of a text can be shown: a terminal obeys the rest, whoever has put it there."""

from typing import Final

CONTROLS: Final = r"\x00-\x1f\x7f-\x9f"
"""For the brackets of a pattern. Some terminals take those after 0x7f for ESC and a letter."""


def spelt_out(text: str) -> str:
    r"""Return `text` with what cannot be printed as Python would write it, such as ``\x1b``.

    Its lines stay lines.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character == "\n"
        else character.encode("unicode_escape").decode()
        for character in text
    )
