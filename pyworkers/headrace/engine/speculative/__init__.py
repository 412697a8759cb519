"""Tokens drafted ahead: how they are made, how many, and what they need of the scheduler."""
