"""The shared vocabulary: values, messages, state machines and limits.

Frozen values and pure functions only: no clock, file, socket or process.
"""
