"""Exit statuses of commands that were told something impossible: another start cannot help, if they never worked."""

EXIT_USAGE = 2  # flags
EXIT_CONFIG = 78  # what this machine, or what is installed on it, cannot do
