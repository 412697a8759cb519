"""Pools, transfers and their two ends, in one process or several."""
