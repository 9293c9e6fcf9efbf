"""How a job's agents are started on a host, found again and ended; one launcher per host."""
