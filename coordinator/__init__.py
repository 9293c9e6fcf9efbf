"""Decides what each job needs next (`coordinator.decide`), commits that, then performs it."""
