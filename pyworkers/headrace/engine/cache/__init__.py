"""Blocks of the KV cache: who owns them, what they hold, and what routers and other workers hear of them."""
