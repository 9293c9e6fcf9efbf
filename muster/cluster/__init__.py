"""Mixed machines as values: their description, and where ranks go. Nothing here starts anything."""
