"""Real clients against a router whose mock worker answers by a script: `python -m clients`."""
