"""The REST API: HTTP requests to database rows, rows to JSON and event streams."""
