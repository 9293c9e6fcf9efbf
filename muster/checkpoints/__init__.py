"""Makes state durable, and finds the newest trustworthy one. Never decides when."""
