"""What runs on a host: the agent, parent of a job's ranks there, and the launcher of one rank."""
