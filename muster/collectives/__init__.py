"""Transports and reductions between the ranks of one group."""
