"""One file per thing that is served."""
