"""What models compute with. `ops` is the seam; `native` (Rust) serves the CPU, `torch_ops` with Triton a GPU."""
