"""The device that --device names: one that need not be here, or this machine's."""

import dataclasses
import os

import jax

from jaxkv.core.errors import ConfigError
from jaxkv.device import DEVICES, Device, local_device
from jaxkv.execution.memory import available_memory

HERE = "detect"


def this_machine() -> tuple[Device, int | None]:
    """Its device with its memory and, of a CPU, the bytes that are free."""
    # The allocator may have all of the device and takes nothing yet: so its limit is the device's memory.
    os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "1.0"}
    found = dataclasses.replace(local_device(), memory=available_memory())
    return found, found.memory if found.is_cpu else None


def find_device(name: str) -> tuple[Device, int | None]:
    """As `this_machine`; a GPU that is here is not asked unless `name` is HERE, and nothing of it is taken.

    Raises ConfigError for a name that is neither known nor HERE.
    """
    if name == HERE:
        return this_machine()
    if name not in DEVICES:
        raise ConfigError(f"device is {name!r}; it must be one of {', '.join((*DEVICES, HERE))}")
    jax.config.update("jax_platforms", "cpu")
    return DEVICES[name], None
