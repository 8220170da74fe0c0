"""What a plan must know of a device, which need not be there."""

import dataclasses
import re

import jax


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that an engine runs on, or would.

    Attributes:
      name: what people call it. platform: "cpu", "cuda", or another of JAX's.
      capability: compute capability of a CUDA device, (9, 0) for Hopper.
      memory: bytes that a program can have at most, as CUDA tells them (up to 8 % less than is printed on the card: ECC
        and the driver keep some); None: not known before it is asked.
    """

    name: str
    platform: str
    capability: tuple[int, int] | None = None
    memory: int | None = None

    @property
    def is_cpu(self) -> bool:
        return self.platform == "cpu"


_MiB = 2**20
DEVICES = {
    device.name: device
    for device in (
        # Totals as cudaGetDeviceProperties reported them, in whole MiB. Drivers differ by some 100 MiB.
        Device("h200", "cuda", (9, 0), 143_156 * _MiB),
        Device("h100", "cuda", (9, 0), 81_008 * _MiB),
        Device("a100-80g", "cuda", (8, 0), 81_158 * _MiB),
        Device("a100-40g", "cuda", (8, 0), 40_326 * _MiB),
        Device("24g", "cuda", (8, 6), 22_515 * _MiB),  # an A10 with ECC: the least that cards "with 24 GB" have
    )
}


def local_device() -> Device:
    """JAX's first device; its memory is for `memory.available_memory` to ask."""
    device = jax.local_devices()[0]
    capability = re.fullmatch(r"(\d+)\.(\d+)", getattr(device, "compute_capability", ""))  # AMD's are no numbers
    return Device(
        name=device.device_kind,
        platform="cuda" if capability else device.platform,
        capability=(int(capability[1]), int(capability[2])) if capability else None,
    )
