"""Real processes: servers, what they need beside them, and what is left of them."""
