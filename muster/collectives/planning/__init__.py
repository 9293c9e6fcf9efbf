"""Which algorithm a call takes, by what a link is measured to cost."""
