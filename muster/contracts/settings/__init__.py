"""What the environment says, and where files are."""
