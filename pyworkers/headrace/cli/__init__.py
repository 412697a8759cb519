"""The command `headrace`: one module a command, and what they say to a person before a terminal."""
