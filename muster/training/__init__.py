"""Managed training: one model on any number of ranks, with the same bits; or one model per rank."""
