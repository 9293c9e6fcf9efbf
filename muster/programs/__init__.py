"""Built-in programs for synchronous training."""
