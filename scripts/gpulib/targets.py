"""The GPUs that kernels are built for, as XLA's compiler wants them described.

Figures are NVIDIA's data sheets and CUDA's occupancy tables. Clocks and bandwidths only steer XLA's cost model.
"""

import dataclasses

from jaxkv.core.devices import DEVICES


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """One GPU.

    Attributes:
      name: as the driver calls it. arch: ptxas' name of the instruction set. capability: compute capability, in protobuf text.
      num_sms: streaming multiprocessors. bandwidth: bytes a second of its memory, by the data sheet.
    """

    name: str
    arch: str
    capability: str
    num_sms: int
    fp32_lanes: int
    shared_memory: int
    memory: int
    bandwidth: int
    l2: int
    clock_ghz: float

    def description(self) -> str:
        """XLA's GpuTargetConfig in protobuf text."""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_memory}
  shared_memory_per_block_optin: {self.shared_memory - 1024}
  core_count: {self.num_sms} fpus_per_core: {self.fp32_lanes}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2} clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory} cuda_compute_capability {{ {self.capability} }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{self.name}"
"""


_HOPPER = {
    "arch": "sm_90a",
    "capability": "major: 9 feature_extension: ACCELERATED_FEATURES",
    "num_sms": 132,
    "fp32_lanes": 128,
    "shared_memory": 233_472,
    "l2": 52_428_800,
    "clock_ghz": 1.98,
}
TARGETS = {
    "a100": GpuTarget(
        name="NVIDIA A100-SXM4-80GB",
        arch="sm_80",
        capability="major: 8",
        num_sms=108,
        fp32_lanes=64,
        shared_memory=167_936,
        memory=85_100_068_864,
        bandwidth=DEVICES["a100-80g"].bandwidth,
        l2=41_943_040,
        clock_ghz=1.41,
    ),
    "h100": GpuTarget(name="NVIDIA H100 80GB HBM3", memory=84_942_979_072, bandwidth=DEVICES["h100"].bandwidth, **_HOPPER),
    "h200": GpuTarget(name="NVIDIA H200", memory=151_397_597_184, bandwidth=DEVICES["h200"].bandwidth, **_HOPPER),
}
