"""What runs on a node: the agent that parents a job's ranks, and the launcher of one rank."""
