"""The history of the database's shape. Expand first, contract in a later release.

A new revision is a file ``versions/r<number>_<what>.py`` that names the one before it; it may be
called with any number of processes of the previous release still at work. `store.schema` runs it
and must be told the new head; tests/unit/store/test_schema.py fails until tables, revisions and
head agree.
"""
