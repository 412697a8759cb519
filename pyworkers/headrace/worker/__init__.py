"""One worker: its process, its model, its loop over the routers that it serves.

Reading order: `main.py` (the process), `load_model.py`, `worker.py` (the loop), `step_executor.py` with `step_timer.py`
(the thread that runs the engine), `outbox.py` (what each router is told).
"""
