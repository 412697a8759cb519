"""Constants of the model that no table and no data sheet has. Each stands for all GPUs, sizes and phases."""

from __future__ import annotations

# Of the rate of a data sheet, what exchanges reach. DeepEP on H800 sends at 43 of 50 GB/s over the network (16 ranks)
# and 153 and 158 of 200 over NVLink; TensorRT-LLM's one-sided kernels on GB200 reach 753 and 728 of 900.
LINK_SHARE = 0.82
# Microseconds of an exchange without rows: TensorRT-LLM's kernels with few rows, and what DeepEP's low-latency kernels
# take on 16 to 256 ranks beyond their bytes.
NVLINK_FLOOR_US = {"dispatch": 18.0, "combine": 31.0}
NETWORK_FLOOR_US = {"dispatch": 20.0, "combine": 20.0}
# Of the roof, what matrix products without a table reach: 65 % of bandwidth (DeepGEMM on H800, o_proj and q_b).
ROOF_SHARE = 0.65
# What a layer does beside tables and exchanges: router with its choice (15 us, TensorRT-LLM's fused kernels) and two
# norms with quantisation (4 us each, a guess).
GLUE_US = 23.0
# Between two steps; a guess.
STEP_GAP_US = 500.0
# Load of the busiest rank over the mean, less one, measured with R1 on 32 GB200 (TensorRT-LLM): with rebalancing, where
# some is left because loads change, and without.
BALANCED_EXCESS = 0.11
UNBALANCED_EXCESS = 1.564
# Of the memory, what weights and KV may fill; of that, what activations and graphs take. As in the presets of `sim`.
MEMORY_SHARE = 0.9
WORKING_BYTES = 4e9
# Mean over maximum of the tokens that ranks have in a step that mixes prompts and answers: measured on 8 GB200
# (TensorRT-LLM), where prompts wait for each other.
MIXED_BALANCE = 0.877
