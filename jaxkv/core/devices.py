"""Devices by name: what a plan and a cost model must know of one that need not be there."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that an engine runs on, or would.

    Attributes:
      name: what people call it. platform: "cpu", "cuda", or another of JAX's.
      capability: compute capability of a CUDA device, (9, 0) for Hopper.
      memory: bytes that a program can have at most, as CUDA tells them (up to 8 % less than is printed on the card: ECC
        and the driver keep some); None: not known before it is asked.
      flops: bfloat16 FLOP/s of the tensor cores, dense; bandwidth: bytes a second of its memory. Both by the data sheet,
        None where unknown.
    """

    name: str
    platform: str
    capability: tuple[int, int] | None = None
    memory: int | None = None
    flops: float | None = None
    bandwidth: int | None = None

    @property
    def is_cpu(self) -> bool:
        return self.platform == "cpu"


_MiB = 2**20
DEVICES = {
    device.name: device
    for device in (
        # Totals as cudaGetDeviceProperties reported them, in whole MiB. Drivers differ by some 100 MiB.
        Device("h200", "cuda", (9, 0), 143_156 * _MiB, 989.4e12, 4_800_000_000_000),
        Device("h100", "cuda", (9, 0), 81_008 * _MiB, 989.4e12, 3_352_000_000_000),
        Device("a100-80g", "cuda", (8, 0), 81_158 * _MiB, 312e12, 2_039_000_000_000),
        Device("a100-40g", "cuda", (8, 0), 40_326 * _MiB, 312e12, 1_555_000_000_000),
        # An A10 with ECC: the least that cards "with 24 GB" have.
        Device("24g", "cuda", (8, 6), 22_515 * _MiB, 125e12, 600_000_000_000),
    )
}
