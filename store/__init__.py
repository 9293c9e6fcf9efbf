"""The database: rows in, values out. SQLAlchemy lives here and nowhere else."""
