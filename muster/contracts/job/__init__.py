"""What a job is: its description, its states, and what is done when a process of it ends."""
