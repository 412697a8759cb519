"""The engine of a worker: paged KV cache, continuous batching, sampling. No I/O, no threads.

Reading order: `engine.py` (one step, top to bottom), `scheduler.py` and `cache/block_pool.py` (who computes what, and
where), `step/` (plan, arrays, forward pass), `sampling/`; `speculative/` for multi-token prediction; then `outputs.py`
and `cache/block_log.py` (for routers).
"""
