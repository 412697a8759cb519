"""Rows and ranks that kernels are called with, and what the memory of a call is."""
