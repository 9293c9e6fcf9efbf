"""Turns a group of ranks into a sum. Knows nothing of jobs."""
