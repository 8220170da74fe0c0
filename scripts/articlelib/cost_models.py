"""The cost models that simulated worlds run on."""

from jaxkv.core.model_config import ModelConfig
from jaxkv.device import Device
from jaxkv.execution.kv_cache import kv_bytes_per_token
from jaxkv.simulation import roofline
from jaxkv.simulation.cost_model import CostModel


def of_roofline(model: ModelConfig, device: Device, dtype: str, kv_cache_dtype: str) -> CostModel:
    """Weights of two bytes; K/V as stored."""
    stored = dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    return roofline.roofline(model, device, kv_bytes=kv_bytes_per_token(model, stored))
