"""Bytes of strangers, changed at random: `make fuzz` runs the targets of `fuzz/` (Rust) and those of `files.py`."""
