"""Gradients in fewer bytes; docs/compression.md."""
