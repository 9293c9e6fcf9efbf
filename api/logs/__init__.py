"""Log files read backwards for a tail and forwards for a stream."""
