"""Machines of one household that find and trust each other; docs/home.md."""
