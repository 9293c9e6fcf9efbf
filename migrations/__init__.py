"""The schema's history for Alembic. Expand first, contract in a later release.

A new revision is a file ``versions/r<number>_<what>.py`` that names the revision before it. Once
released it is frozen: it uses plain types, because those of `database.tables` may change.
Processes of the previous release may still write while it runs. The way back is a backup.
`database.tables` runs it and holds the number of the head; tests/unit/database compares tables,
revisions and head.
"""
