"""jaxkv: large language model inference in pure JAX, built around a paged KV cache.

Importing it imports no jax; the public names are loaded when they are first used.
"""

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxkv.core.config import EngineConfig
    from jaxkv.core.request import SamplingParams, StructuredOutputs
    from jaxkv.llm import LLM

_PUBLIC = {
    "LLM": "jaxkv.llm",
    "SamplingParams": "jaxkv.core.request",
    "StructuredOutputs": "jaxkv.core.request",
    "EngineConfig": "jaxkv.core.config",
}

__all__ = ["LLM", "EngineConfig", "SamplingParams", "StructuredOutputs", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name == "__version__":
        try:
            return version("jaxkv")
        except PackageNotFoundError:  # a source tree on the path, not installed
            return "0+unknown"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
