"""What muster asks of and does on this machine: processes, containment, sockets, limits."""
