"""What all messages share, but those that are JSON lines, and hellos, which every version reads."""

import msgspec


class Message(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="is"
):
    """Common shape: immutable, named fields only, tagged."""
