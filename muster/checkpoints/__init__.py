"""Makes state durable, and finds the newest trustworthy one. Never decides when.

vault.py        saves and restores one rank's checkpoints: the face of this package
reader.py       finds the newest checkpoint that verifies
retention.py    which checkpoints may go (a pure rule)
names.py        what the directories and files are called
manifest.py     what a checkpoint says about itself, under its own hash
state.py        what a state may hold: arrays (arrays.py) and values (values.py)
modes.py        which way of training a job's checkpoints are of
shelves.py      where in a job's directory they lie, and what is to be said of each
comparison.py   what differs between two states
export.py       arrays for other programs
identity.py     the sha256 of a state, to show that two runs agree
durable.py      write, fsync, rename, fsync: the named sequences
filesystem.py   the port to the world, at the granularity of system calls
memory.py       a file system in memory that records, fails on request and replays
power_cut.py    what may be left of it after a kill or a power cut
errors.py       the error tree
"""
