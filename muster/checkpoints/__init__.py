"""Durable checkpoints: save, verify, restore, list, compare, export and delete them.

manager.py     saves, restores and fences one rank's checkpoints: the face of this package
reader.py      finds the newest intact checkpoint
manifest.py    file names, and the manifest that describes a checkpoint
format.py      arrays as safetensors, other values as JSON
local.py       the file-system port, and the durable sequences on top of it
listing.py     the checkpoints in a job's directory and their condition
comparison.py  differences between two states, and the sha256 of one
export.py      arrays for other programs
deletion.py    the files of a deleted job
errors.py      the error tree
"""
