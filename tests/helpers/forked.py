"""Processes of a test that start at once: forked from one that has imported torch and started nothing.

A process that is spawned imports torch by itself, which takes seconds of a core. Each worker of pytest keeps one to
fork from.
"""

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
# Nothing of the tests: what only pytest's path finds is not found there, and passed over in silence.
FORKED.set_forkserver_preload(
    [
        "headrace.worker.parallel.group",
        "headrace.worker.parallel.rebalance",
        "headrace.worker.parallel.rendezvous",
        "headrace_kernels.native",
        "headrace_kernels.transport.all_gather",
        "headrace_kernels.transport.choose",
        "headrace_kernels.transport.gloo",
        "headrace_kernels.transport.shared_memory",
    ]
)
