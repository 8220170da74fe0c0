"""Resident memory above that before loading: under the stored weights + the largest tensor in float32 + 10 %.

Measured in a process of its own by the kernel's high-water mark, reset just before loading. On CPU the device's memory
is resident memory too.
"""

import json
import os
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest

from jaxkv.loading.convert import convert
from jaxkv.loading.model_config import parse_hf_config
from jaxkv.loading.resolve import resolve_model

# 48.2 million parameters: 193 MB in float32, its largest tensor 49 MB.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 24_000,
    "hidden_size": 512,
    "intermediate_size": 2_048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}

MEASURE = """
    import json, logging, sys
    from pathlib import Path
    import jax, numpy as np
    from jaxkv.loading.resolve import resolve_model
    from jaxkv.loading.weights import load_config, load_weights

    def kernel(field):
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024

    def sharding(name, shape):
        spec = jax.P("model") if len(shape) == 2 else jax.P()
        return jax.NamedSharding(mesh, spec)

    source, dtype = resolve_model(sys.argv[1]), sys.argv[2]
    config = load_config(source)
    mesh = jax.make_mesh((len(jax.devices()),), ("model",))
    jax.device_put(np.zeros(8)).delete()  # starts the backend
    Path("/proc/self/clear_refs").write_text("5")
    before = kernel("VmRSS")
    model = load_weights(source, config, dtype=dtype, sharding=sharding if len(jax.devices()) > 1 else None)
    peak = kernel("VmHWM") - before
    per_device, full_copies = {}, []
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            per_device[shard.device.id] = per_device.get(shard.device.id, 0) + shard.data.nbytes
            if array.ndim == 2 and shard.data.shape == array.shape:
                full_copies.append(array.shape)
    json.dump({"peak": peak, "per_device": per_device, "full_copies": full_copies}, sys.stdout)
"""


def measure(path, dtype: str, num_devices: int = 1) -> dict:
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), str(path), dtype],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}, stdout=subprocess.PIPE, text=True, timeout=120, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def assert_bounded(found: dict, num_parameters: int, largest: int, dtype: str, record_property) -> None:
    stored = num_parameters * (4 if dtype == "float32" else 2)
    bound = 1.1 * (stored + 4 * largest)
    figures = {"peak": found["peak"], "stored": stored, "largest_float32": 4 * largest, "bound": int(bound)}
    record_property("bytes", figures)
    sys.stdout.write(f"{figures}\n")  # shown by pytest -rP
    # Below the weights themselves the measurement would be wrong.
    assert 0.95 * stored < found["peak"] < bound, figures


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gguf(demo_source, record_property, dtype):
    found = measure(demo_source.path, dtype)
    assert_bounded(found, 134_515_008, 49_152 * 576, dtype, record_property)


@pytest.mark.parametrize(
    ("stored", "num_shards", "dtype"),
    [(np.float32, 1, "bfloat16"), (ml_dtypes.bfloat16, 4, "float32")],
)
def test_safetensors(write_folder, random_tensors, record_property, stored, num_shards, dtype):
    config = parse_hf_config(CONFIG, "here")
    folder = write_folder(CONFIG, random_tensors(config, stored), num_shards)
    found = measure(folder, dtype)
    assert_bounded(found, config.num_parameters(), config.vocab_size * config.hidden_size, dtype, record_property)


def test_orbax(write_folder, random_tensors, tmp_path, record_property):
    """Onto two devices each takes half of every matrix, and no full copy is made on the way."""
    config = parse_hf_config(CONFIG, "here")
    folder = convert(resolve_model(str(write_folder(CONFIG, random_tensors(config)))), tmp_path / "orbax")
    norms = 4 * 13 * 512  # bytes that every device holds: (2 a layer + the last) * 512 floats
    for num_devices in (1, 2):
        found = measure(folder, "float32", num_devices)
        assert_bounded(
            found, config.num_parameters(), config.vocab_size * config.hidden_size, "float32", record_property
        )
        expected = (4 * config.num_parameters() - norms) // num_devices + norms
        assert found["per_device"] == {str(i): expected for i in range(num_devices)}
        if num_devices == 2:
            assert found["full_copies"] == []
