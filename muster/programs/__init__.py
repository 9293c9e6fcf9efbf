"""Programs for synchronous training that come with Muster."""
