"""What an agent says to its coordinator, and sends home to it."""
