"""Read what the ranks of a job have printed: the last lines, or all lines from a position on."""
