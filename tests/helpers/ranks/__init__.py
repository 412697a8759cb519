"""Groups of ranks inside one process."""
