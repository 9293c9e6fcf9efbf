"""The conversations of a coordinator with agents, and what these send."""
