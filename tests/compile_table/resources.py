"""Registers, spills and shared memory of kernels, as ptxas gives them, and what of it is too much."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compile_table.launches import Launch

WORKERS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Of one kernel. Registers and spills are of a thread, shared memory is of a block of threads."""

    registers: int
    spill_bytes: int  # the larger one of what is stored and what is loaded
    stack_bytes: int
    shared_bytes: int
    threads: int


def compiled(launch: Launch) -> Resources:
    """Compile it, whatever Triton has kept."""
    log = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(log):
        os.environ |= {"TRITON_CACHE_DIR": folder, "TRITON_DUMP_PTXAS_LOG": "1"}
        source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attrs)
        target = GPUTarget("cuda", launch.sm, 32)
        kernel = triton.compile(source, target=target, options=vars(launch.options))
    shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
    return of_log(log.getvalue(), shared_bytes=shared, threads=32 * warps)


def of_log(log: str, *, shared_bytes: int, threads: int) -> Resources:
    """Read what `ptxas -v` printed about a kernel."""
    frame = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )
    registers = re.search(r"Used (\d+) registers", log)
    if frame is None or registers is None:
        raise ValueError(f"ptxas says nothing about registers or spills: {log!r}")
    stack, stores, loads = map(int, frame.groups())
    return Resources(
        registers=int(registers[1]), spill_bytes=max(stores, loads), stack_bytes=stack, shared_bytes=shared_bytes,
        threads=threads,
    )  # fmt: skip


_todo: Sequence[Launch] = ()  # of a forked process: kernels cannot be pickled


def _compiled_at(place: int) -> Resources:
    return compiled(_todo[place])


def all_compiled(todo: Sequence[Launch]) -> list[Resources]:
    """Compile kernels side by side."""
    global _todo
    _todo = todo
    if not todo:
        return []
    with multiprocessing.get_context("fork").Pool(min(WORKERS, len(todo))) as pool:
        return pool.map(_compiled_at, range(len(todo)), chunksize=1)
