"""Objects in an S3-compatible store: the client, its errors, and what a store must promise."""
