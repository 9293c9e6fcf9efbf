"""The ``muster`` command line: it talks HTTP to the API and starts the services."""
