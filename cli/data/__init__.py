"""Commands about data sets and checkpoints."""
