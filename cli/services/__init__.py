"""Commands that start the services, and say how they are."""
