"""Headrace: LLM serving from a fleet of workers behind one router. Importing this loads nothing heavy."""

__version__ = "0.1.0"
