"""Managed synchronous training: one model, any number of ranks, the same bits."""
