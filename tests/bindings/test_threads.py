"""The thread that loads headrace._core may end: others that come after it, under its number too, allocate as before."""

import subprocess
import sys

LOADED_BY_A_THREAD = """
import threading

def load():
    global _core
    from headrace import _core

def refused():
    for part in [getattr(_core, name) for name in dir(_core)] * 100:
        try:
            part(object())  # an error is made, so something is allocated
        except Exception:
            pass

def together(target, threads):
    started = [threading.Thread(target=target) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()

together(load, 1)
for _ in range(30):
    together(refused, 4)
print("alive")
"""


def test_the_thread_that_loads_it_may_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED_BY_A_THREAD],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
