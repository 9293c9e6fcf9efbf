"""The database: rows in, values out. No other package imports SQLAlchemy."""
