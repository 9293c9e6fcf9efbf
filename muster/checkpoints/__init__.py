"""Durable checkpoints: save, verify, restore, list, compare, export and delete them.

manager.py      saves and restores one rank's checkpoints: the face of this package
reader.py       finds the newest intact checkpoint
store.py        what a place for checkpoints guarantees
local_store.py  a directory: the durable sequence, and fences
s3.py           a prefix of a bucket: conditional writes, and tokens
local.py        the file-system port, and the durable sequences on top of it
manifest.py     file names, and the manifest that describes a checkpoint
format.py       arrays as safetensors, other values as JSON
listing.py      the checkpoints of a job and their condition
comparison.py   differences between two states, and the sha256 of one
export.py       arrays for other programs
deletion.py     the files of a deleted job
errors.py       the error tree
"""
