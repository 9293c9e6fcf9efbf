"""Commands that check machine and script, and strike jobs."""
