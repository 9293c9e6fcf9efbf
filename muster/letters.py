"""Text that is cut somewhere: not in the midst of a letter."""

import codecs


def whole_letters(content: bytes) -> int:
    """Return how long `content` is without the beginning of a letter, of UTF-8, at its end.

    Bytes that are no text are letters, too, as far as this goes.
    """
    return codecs.utf_8_decode(content, "replace")[1]
