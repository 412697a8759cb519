"""How long a step takes: sizes, machines, measured kernels, and what is exchanged."""
