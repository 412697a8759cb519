"""Compiles every Triton kernel for GPUs that are not here, and tables what each one takes.

    make compile-table

shapes.py says at which sizes; launches.py collects what the wrappers launch; resources.py compiles it; measure.py is
the process that does so with one Triton, tritons.py starts it; table.py is what is committed, and what is too much;
spilling.py is a kernel that the test must refuse.
"""
