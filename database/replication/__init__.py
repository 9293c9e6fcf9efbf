"""Copies of an SQLite database on other machines: see docs/internals/replication.md."""
