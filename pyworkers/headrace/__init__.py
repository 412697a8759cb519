"""Headrace: LLM serving from a fleet of workers behind one router. Importing this loads nothing heavy."""

from headrace.version import VERSION

__version__ = VERSION
