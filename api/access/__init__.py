"""Who may send a request, how many of them, and what every response carries."""
