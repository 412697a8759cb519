"""Engines, schedulers and samplers on a model without weights that sees every mistake."""
