"""What the harness does inside of a real worker: its named steps, and what may happen at each."""
