"""What all tests share: one thread for numerics, the CPU unless the machine has more, Ctrl-C as a terminal has it."""

import os
import signal

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # before anything imports torch or numpy
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests reach no hub

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell that runs us in the background makes us, and every process that a test starts, deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
