"""The engine of a worker: paged KV cache, continuous batching, sampling. No I/O, no threads.

Reading order: `engine.py` (one step, top to bottom), `schedule.py` and `block_pool.py` (who computes what, and where),
`batch_builder.py`, `sampler.py` with `narrow.py` and `noise.py`, then `outbox.py` and `block_log.py` (for routers).
"""
