"""Tiny checkpoints, the oracle beside them, and what runs steps through a model without an engine."""
