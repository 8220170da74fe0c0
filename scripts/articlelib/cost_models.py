"""The cost models that simulated worlds run on."""

from jaxkv.core.model_config import ModelConfig
from jaxkv.device import Device
from jaxkv.simulation.cost_model import CostModel, ConstantCostModel


def roofline(model: ModelConfig, device: Device, dtype: str, kv_cache_dtype: str) -> CostModel:
    return ConstantCostModel(0.0005, 0.00009, 0.0105, 0.00003)
