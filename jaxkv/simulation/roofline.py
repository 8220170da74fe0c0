"""What a step should take on a device that is not here, from the model's shape and two figures of a data sheet.

A call is a prefill pass and decode steps, one after another. Each pass reads all weights once and takes the longer of

    compute   2 FLOP a parameter and token, 4 L H D a pair of tokens in attention      at a share of the peak
    memory    weights, K/V that is read and written                                    at a share of the bandwidth

and a fixed time for each layer's launches; a call takes the host's share beside. The shares are stated in `Efficiency`:
nothing here was fitted to a run, and compares settings better than it predicts seconds (see `fitted_cost` for that).
Sliding windows are not seen: every layer counts as attending to everything.
"""

import dataclasses

from jaxkv.core.devices import DEVICES, Device
from jaxkv.core.errors import ConfigError
from jaxkv.core.model_config import ModelConfig
from jaxkv.core.plan import PlanShape


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """How near a good implementation comes to a data sheet.

    Attributes:
      matmul: of the peak FLOP/s, in the matrix products of a prefill. Large bfloat16 products alone reach 0.80 on an H200
        (790 of 989 TFLOP/s).
      attention: of the peak FLOP/s, in prefill attention: 350 TFLOP/s expected of 989.
      memory: of the bandwidth: copies reach 0.90 (4.3 of 4.8 TB/s), decode kernels are aimed at 0.90 of that.
      layer_seconds: of a pass, for each layer, whatever its size. call_seconds: of a call: what overlap does not hide.
    """

    matmul: float = 0.70
    attention: float = 0.35
    memory: float = 0.80
    layer_seconds: float = 10e-6
    call_seconds: float = 0.3e-3


@dataclasses.dataclass(frozen=True)
class RooflineCostModel:
    """A `CostModel` of a Llama-like model on a device.

    Attributes:
      layer_params: parameters of all layers' matrices, that every token goes through. head_params: of the output layer,
        that only tokens to be sampled go through.
      attention_flops: of one pair of tokens, in all layers.
      weight_bytes: read by each pass. kv_bytes: of one token's K/V in all layers.
      flops / bandwidth: the device's peaks.
    """

    num_layers: int
    layer_params: int
    head_params: int
    attention_flops: int
    weight_bytes: int
    kv_bytes: int
    flops: float
    bandwidth: float
    efficiency: Efficiency = Efficiency()

    def seconds(self, shape: PlanShape) -> float:
        use = self.efficiency
        seconds = use.call_seconds + 2 * shape.copied_tokens * self.kv_bytes / (self.bandwidth * use.memory)
        if shape.prefill_tokens:
            seconds += self._pass(
                shape.prefill_tokens * self.layer_params,
                shape.prefill_pairs,
                shape.prefill_context + shape.prefill_tokens,
            )
        if shape.num_steps:
            rows, steps = shape.decode_rows, shape.num_steps
            kv_tokens = shape.decode_kv_tokens + rows * (steps - 1) / 2  # on average: a token more a row and step
            seconds += steps * self._pass(rows * (self.layer_params + self.head_params), kv_tokens, kv_tokens)
        return seconds

    def _pass(self, products: float, pairs: float, kv_tokens: float) -> float:
        """`products`: tokens times parameters."""
        use = self.efficiency
        compute = 2 * products / use.matmul + self.attention_flops * pairs / use.attention
        memory = self.weight_bytes + self.kv_bytes * kv_tokens
        return max(compute / self.flops, memory / (self.bandwidth * use.memory)) + self.num_layers * use.layer_seconds


def roofline(
    model: ModelConfig,
    device: Device,
    *,
    kv_bytes: int,
    weight_itemsize: int = 2,
    efficiency: Efficiency = Efficiency(),
) -> RooflineCostModel:
    """The cost model of `model` on `device`.

    Args:
      kv_bytes: of one token's K/V in all layers, as stored.
      weight_itemsize: bytes of a weight.

    Raises ConfigError for a device whose peaks are not known.
    """
    if device.flops is None or device.bandwidth is None:
        known = ", ".join(name for name, one in DEVICES.items() if one.flops is not None)
        raise ConfigError(
            f"the peaks of device {device.name!r} are not known: choose one of {known}, or measure this one with "
            "calibrate_cost_model.py and give its file as cost_model"
        )
    embedding = model.vocab_size * model.hidden_size
    layers = model.num_parameters() - embedding * (1 if model.tie_word_embeddings else 2)
    return RooflineCostModel(
        num_layers=model.num_layers,
        layer_params=layers,
        head_params=embedding,
        attention_flops=4 * model.num_layers * model.num_heads * model.head_dim,
        weight_bytes=(layers + embedding) * weight_itemsize,
        kv_bytes=kv_bytes,
        flops=device.flops,
        bandwidth=device.bandwidth,
        efficiency=efficiency,
    )
