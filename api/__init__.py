"""The front desk: HTTP in, rows out; rows in, JSON and event streams out."""
