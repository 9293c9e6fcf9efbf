"""How a process is supervised: its side of the connection to the agent, and its exit."""
