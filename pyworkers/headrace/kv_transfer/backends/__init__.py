"""What moves KV bytes from pool to pool, each way behind the protocol in `base.py`."""
