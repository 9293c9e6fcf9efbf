"""Gradients in fewer bytes, with what was not sent added to the next; docs/compression.md.

kind.py      the interface of a kind, its messages, and kinds with a code an element
half.py      fp16 and bf16, and rounding to them
int8.py, sign.py, top_k.py, random_mask.py, power_sgd.py
kinds.py     kinds by name, and by the size of an array
exchange.py  averages arrays over all ranks, with error feedback
"""
