"""Exit statuses that say what another start is good for."""

# The command was told something impossible: another start cannot help, if it never worked.
EXIT_USAGE = 2  # flags
EXIT_CONFIG = 78  # what this machine, or what is installed on it, cannot do
# Another rank of the worker's group is gone: all of them have to start again.
EXIT_RANK_LOST = 75
