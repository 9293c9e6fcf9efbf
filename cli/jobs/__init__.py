"""Commands about jobs, and about the inside of one."""
