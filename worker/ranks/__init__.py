"""The ranks of one host: how they are started, watched and ended."""
