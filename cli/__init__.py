"""A person's hand: talks HTTP to the API and starts the processes."""
