"""Products with dense weights, and what stands between them row by row."""
