"""Read log files: backwards for a tail, forwards for a stream."""
