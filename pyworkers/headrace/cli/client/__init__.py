"""Commands that speak to a running router, and how they reach it: addresses, keys, what a terminal may be sent."""
