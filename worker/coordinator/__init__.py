"""What an agent says to its coordinator, and sends to it."""
