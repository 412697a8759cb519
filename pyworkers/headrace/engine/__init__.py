"""The engine of a worker: paged KV cache, continuous batching, sampling. No I/O, no threads.

Reading order: `engine.py` (one step, top to bottom), `schedule.py` and `block_pool.py` (who computes what, and where),
`batch_builder.py`, `sampler.py` with `edits.py`, `narrow.py` and `noise.py`, `verify.py`; `draft.py`, `adaptive.py`
with `acceptance.py` and `row_cost.py`, and `ahead.py` for multi-token prediction; then `answering.py`, `outbox.py` and
`block_log.py` (for routers).
"""
