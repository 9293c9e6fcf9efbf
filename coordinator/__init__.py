"""Decides what each job needs next (pure), then performs it."""
