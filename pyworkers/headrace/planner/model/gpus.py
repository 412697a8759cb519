"""GPUs that can be planned with, by their data sheets: dense rates, one direction of each link."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, in the machine that it is usually sold in."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    bf16_flops: float
    fp8_flops: float
    fp4_flops: float | None  # None: the GPU has none
    nvlink_bytes_per_s: float
    nvlink_gpus: int  # that reach each other by NVLink
    network_bytes_per_s: float
    measured: str  # the system whose kernel latencies stand for it

    @property
    def weights(self) -> str:
        """Type of the experts that its tensor cores are fastest with."""
        return "fp8" if self.fp4_flops is None else "nvfp4"

    def flops(self, weights: str) -> float:
        if weights == "nvfp4":
            return self.fp4_flops or self.fp8_flops
        return self.fp8_flops


def _hopper(name: str, memory: float, bandwidth: float, nvlink: float, flops: float = 1.0) -> Gpu:
    """Of 8 in a machine. `flops`: share of an H100's arithmetic."""
    return Gpu(
        name=name,
        memory_bytes=memory,
        bytes_per_s=bandwidth,
        bf16_flops=989e12 * flops,
        fp8_flops=1979e12 * flops,
        fp4_flops=None,
        nvlink_bytes_per_s=nvlink,
        nvlink_gpus=8,
        network_bytes_per_s=50e9,
        measured="h200_sxm",
    )


def _nvl72(name: str, memory: float, fp4_flops: float, network: float) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=memory,
        bytes_per_s=8e12,
        bf16_flops=2500e12,
        fp8_flops=5000e12,
        fp4_flops=fp4_flops,
        nvlink_bytes_per_s=900e9,
        nvlink_gpus=72,
        network_bytes_per_s=network,
        measured=name,
    )


# Memory as in the presets of `sim` where they have it. Network: 400 Gbit/s for each GPU where nothing else stands.
_ALL = (
    _hopper("h100", 80e9, 3.35e12, 450e9),
    _hopper("h800", 80e9, 3.35e12, 200e9),
    _hopper("h200", 141e9, 4.8e12, 450e9),
    # 4 network cards for 8 GPUs
    replace(_hopper("h20", 96e9, 4.0e12, 450e9, flops=148 / 989), network_bytes_per_s=25e9),
    Gpu(
        name="b200",
        memory_bytes=180e9,
        bytes_per_s=8e12,
        bf16_flops=2250e12,
        fp8_flops=4500e12,
        fp4_flops=9000e12,
        nvlink_bytes_per_s=900e9,
        nvlink_gpus=8,
        network_bytes_per_s=50e9,
        measured="b200_sxm",
    ),
    _nvl72("gb200", 186e9, 10_000e12, 50e9),
    _nvl72("gb300", 279e9, 15_000e12, 100e9),
)
GPUS = {gpu.name: gpu for gpu in _ALL}
