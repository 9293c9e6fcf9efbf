"""The database: rows in, values out. No other package imports SQLAlchemy."""

from typing import Final

HEAD: Final = "r0002"
"""The newest revision in migrations/versions; tests/unit/database/test_schema.py compares them."""
