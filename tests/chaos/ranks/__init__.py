"""Fleets of groups whose ranks can be broken: of mock ranks, and of real ones."""
