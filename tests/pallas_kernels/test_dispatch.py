"""Which implementation runs: named, or the first that can."""

import dataclasses

import pytest

from pallas_kernels import dispatch

CPU = dispatch.Configuration("cpu", None, block_size=16, head_dim=64, group=4, dtype="bfloat16", kv_format="bfloat16")
H200 = dataclasses.replace(CPU, platform="cuda", capability=(9, 0), block_size=64, head_dim=128)


@pytest.mark.parametrize(
    ("configuration", "expected"),
    [
        (CPU, ("xla", "runs on any device; not pallas_triton: needs an NVIDIA GPU, and this is cpu")),
        (H200, ("pallas_triton", "GPU kernels for compute capability 9.0")),
        (
            dataclasses.replace(H200, capability=(8, 0), kv_format="int8"),
            ("pallas_triton", "GPU kernels for compute capability 8.0"),
        ),
        (
            dataclasses.replace(H200, capability=(7, 5)),
            (
                "xla",
                "runs on any device; not pallas_triton: needs compute capability 8.0 (Ampere) or newer, and this GPU has 7.5",
            ),
        ),
        (
            dataclasses.replace(H200, block_size=8),
            (
                "xla",
                "runs on any device; not pallas_triton: block_size must be at least 16, a tensor core's rows, not 8",
            ),
        ),
    ],
)
def test_unset_takes_the_first_supported_and_says_why(configuration, expected):
    assert dispatch.resolve(None, configuration) == expected


@pytest.mark.parametrize("name", [name for name in dispatch.ALL if "mosaic" not in name])  # see test_mosaic_support.py
def test_a_named_implementation_is_taken(name):
    assert dispatch.resolve(name, H200)[0] == name
    assert {dispatch.backend(operation, name) for operation in dispatch.OPERATIONS} == {name}


def test_what_mosaic_gpu_has_no_kernel_for_runs_in_triton():
    backends = {name: dispatch.backend(name, "pallas_mosaic_gpu") for name in dispatch.OPERATIONS}
    assert backends == {
        "decode_attention": "pallas_mosaic_gpu",
        "prefill_attention": "pallas_triton",
        "kv_write": "pallas_triton",
        "block_copy": "pallas_mosaic_gpu",
    }
    assert dispatch.backend("kv_write", "pallas_mosaic_gpu_interpreted") == "pallas_triton_interpreted"
    with pytest.raises(ValueError, match="unknown implementation 'flash'; known: pallas_triton, "):
        dispatch.backend("kv_write", "flash")


@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        ("flash", {}, "'flash' can't run: unknown implementation 'flash'; known: pallas_triton, "),
        ("xla", {"block_size": 4}, "block_size must be a power of two of at least 8, not 4"),
        (None, {"block_size": 24}, "block_size must be a power of two of at least 8, not 24"),
        ("pallas_triton", {}, "'pallas_triton' can't run: needs an NVIDIA GPU, and this is cpu"),
        ("pallas_triton", {"platform": "rocm"}, "needs an NVIDIA GPU, and this is rocm"),
        ("pallas_triton", {"platform": "cuda", "capability": None}, "this GPU has an unknown one"),
        ("pallas_triton_interpreted", {"block_size": 8}, "block_size must be at least 16"),
        ("pallas_triton_interpreted", {"head_dim": 512}, "head_dim must be at most 256, not 512"),
        ("pallas_triton_interpreted", {"head_dim": 256, "dtype": "float32"}, "at most 128 in float32, not 256"),
        ("pallas_triton_interpreted", {"group": 32}, "at most 16 query heads may share a KV head, not 32"),
        (
            "pallas_triton_interpreted",
            {"kv_format": "int4"},
            "the KV format must be one of float32, .*, int8, not int4",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(name, changed, reason):
    with pytest.raises(ValueError, match=reason):
        dispatch.resolve(name, dataclasses.replace(CPU, **changed))


def test_most_blocks_that_can_be_addressed():
    sizes = {"num_kv_heads": 8, "block_size": 64, "head_dim": 128}
    assert dispatch.max_blocks("pallas_triton", **sizes, kv_format="int8") == 2**31 // (8 * 64 * 128) - 1
    assert dispatch.max_blocks("pallas_mosaic_gpu", **sizes, kv_format="int8") == 2**31 // (8 * 64 * 128) - 1
    assert dispatch.max_blocks("pallas_triton", **sizes, kv_format="bfloat16") is None
    assert dispatch.max_blocks("xla", **sizes, kv_format="int8") is None
