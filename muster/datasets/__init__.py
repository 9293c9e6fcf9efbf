"""Directories of line-based shards: their index, their samples, and commands that make them."""
