"""Whether this JAX has Mosaic GPU as the kernels need it (`mma`, TMA and cp.async), without importing it: that takes a fifth
of the time that importing jax takes, and most programs do without."""

import jax

_LEAST_JAX = (0, 11, 2)


def unavailable() -> str | None:
    """Why there is no Mosaic GPU backend for us; None where there is one."""
    if jax.__version_info__ >= _LEAST_JAX:
        return None
    return f"needs JAX {'.'.join(map(str, _LEAST_JAX))} or newer, and this is {jax.__version__}"
