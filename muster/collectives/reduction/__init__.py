"""Sums in the order of a fixed tree, for managed jobs: the same bits for every number of ranks."""
