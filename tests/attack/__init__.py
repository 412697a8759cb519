"""Attacks on a real router: one file for each kind, a probe beside them that says what everybody else notices."""
