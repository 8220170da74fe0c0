"""What `kv_rotation=auto` means, and that a rotating engine generates what it should."""

import pytest

from jaxkv.core.config import EngineConfig
from jaxkv.device import DEVICES, local_device
from jaxkv.settings import resolve_settings
from tests.support.tiny_models import parse, tiny_config


@pytest.mark.parametrize("dtype, rotation", [
    ("auto", "none"), ("bfloat16", "none"), ("int8", "hadamard"), ("int4", "hadamard"), ("int8,int4", "hadamard"),
    ("fp8_e4m3", "none"), ("bfloat16,int8", "none"),
])  # fmt: skip
@pytest.mark.parametrize("device", ["h200", None])
def test_auto_rotates_where_keys_are_integers(dtype, rotation, device):
    device = DEVICES[device] if device else local_device()
    model = parse(tiny_config(head_dim=64))
    for asked, expected in (("auto", rotation), ("none", "none"), ("hadamard", "hadamard")):
        config = EngineConfig(kv_cache_dtype=dtype, kv_rotation=asked)
        assert resolve_settings(config, model, device).kv_rotation == expected
