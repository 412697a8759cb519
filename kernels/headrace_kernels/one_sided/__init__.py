"""Experts on several GPUs without a library: ranks write rows and results straight into each other's memory.

Reading order: `window.py` (where everything is in a rank's memory), `send_places.py`, `put_rows.py`, `signal.py`,
`wait.py` and `return_rows.py` (the kernels, in the order of a layer), `dispatch.py` (a `Dispatch` of them).
"""
