"""The device that is here; those that need not be are in `core.devices`."""

import re

import jax

from jaxkv.core.devices import DEVICES, Device

__all__ = ["DEVICES", "Device", "local_device"]


def local_device() -> Device:
    """JAX's first device; its memory is for `memory.available_memory` to ask."""
    device = jax.local_devices()[0]
    capability = re.fullmatch(r"(\d+)\.(\d+)", getattr(device, "compute_capability", ""))  # AMD's are no numbers
    return Device(
        name=device.device_kind,
        platform="cuda" if capability else device.platform,
        capability=(int(capability[1]), int(capability[2])) if capability else None,
    )
