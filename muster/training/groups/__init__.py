"""The group of ranks that train together, and how its members reach one state."""
