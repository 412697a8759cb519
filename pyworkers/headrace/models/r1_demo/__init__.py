"""A llama written down as DeepSeek-V3, so that a laptop serves R1's code with real weights."""
