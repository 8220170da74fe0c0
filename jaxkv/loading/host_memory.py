"""Host memory of this process, as the kernel counts it."""

import os
import resource
import sys
from pathlib import Path


def resident_bytes() -> int:
    """Resident memory now; where the kernel does not tell (not Linux), the peak so far."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return peak_resident_bytes()
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """Most that was ever resident."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
