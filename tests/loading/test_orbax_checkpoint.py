"""Conversion to Orbax and back, and the program that does it."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jaxkv.core.errors import CheckpointError, ConfigError
from jaxkv.core.model_config import RopeConfig
from jaxkv.loading import orbax
from jaxkv.loading.convert import convert
from jaxkv.loading.model_config import parse_hf_config
from jaxkv.loading.resolve import ORBAX_CONFIG, resolve_model
from jaxkv.loading.weights import load_config, load_weights

REPOSITORY = Path(__file__).parents[2]


def arrays(model) -> dict[str, np.ndarray]:
    return {".".join(map(str, p)): np.asarray(v.get_value()) for p, v in nnx.to_flat_state(nnx.split(model)[1])}


@pytest.fixture
def hf_folder(tiny_config, random_tensors, write_folder):
    config = tiny_config | {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}}
    folder = write_folder(config | {"eos_token_id": [1, 2]}, random_tensors(parse_hf_config(config, "here")), 2)
    (folder / "tokenizer.json").write_text('{"some": "tokenizer"}')
    (folder / "README.md").write_text("not a tokenizer")
    return folder


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_round_trip(hf_folder, tmp_path, dtype):
    source = resolve_model(str(hf_folder))
    stored = resolve_model(str(convert(source, tmp_path / "orbax", dtype=dtype)))
    assert stored.kind == "orbax"
    expected_dtype = "float32" if dtype == "auto" else dtype
    config = load_config(stored)
    assert config == dataclasses.replace(load_config(source), dtype=expected_dtype)
    assert config.rope == RopeConfig(10_000.0, "yarn", 2.0, 64) and config.eos_token_ids == (1, 2)
    before = arrays(load_weights(source, config, dtype=expected_dtype))
    after = arrays(load_weights(stored, config, dtype=expected_dtype))
    assert before.keys() == after.keys() and len(before) == 21
    for name, array in before.items():
        assert after[name].dtype == array.dtype
        np.testing.assert_array_equal(after[name], array, err_msg=name)
    assert {p.name for p in stored.path.iterdir()} == {"params", ORBAX_CONFIG, "tokenizer.json"}


def test_restore_converts_dtypes(hf_folder, tmp_path):
    stored = resolve_model(str(convert(resolve_model(str(hf_folder)), tmp_path / "orbax")))
    config = load_config(stored)
    exact = arrays(load_weights(stored, config, dtype="float32"))
    for name, array in arrays(load_weights(stored, config, dtype="bfloat16")).items():
        np.testing.assert_array_equal(array, exact[name].astype(array.dtype), err_msg=name)


def test_a_converted_checkpoint_converts_again(hf_folder, tmp_path):
    first = convert(resolve_model(str(hf_folder)), tmp_path / "first")
    second = resolve_model(str(convert(resolve_model(str(first)), tmp_path / "second", dtype="float16")))
    config = load_config(second)
    assert config.dtype == "float16" and (second.path / "tokenizer.json").is_file()
    assert arrays(load_weights(second, config, dtype="float16"))["norm.weight"].dtype == np.float16


def test_an_output_that_exists_is_not_touched(hf_folder, tmp_path):
    output = tmp_path / "there"
    output.mkdir()
    (output / "something").touch()
    with pytest.raises(ConfigError, match="--output=.*there exists already"):
        convert(resolve_model(str(hf_folder)), output)
    assert [p.name for p in output.iterdir()] == ["something"]


def test_a_failed_conversion_leaves_nothing(hf_folder, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(orbax, "save", fail)
    with pytest.raises(ConfigError, match="disk full"):
        convert(resolve_model(str(hf_folder)), tmp_path / "out" / "orbax")
    assert list((tmp_path / "out").iterdir()) == []


def test_parameters_that_do_not_fit_the_config(hf_folder, tmp_path):
    folder = convert(resolve_model(str(hf_folder)), tmp_path / "orbax")
    path = folder / ORBAX_CONFIG
    document = json.loads(path.read_text())

    def message(**changes) -> str:
        path.write_text(json.dumps(document | {"model": document["model"] | changes}))
        source = resolve_model(str(folder))
        with pytest.raises(CheckpointError) as caught:
            load_weights(source, load_config(source), dtype="float32")
        return str(caught.value)

    assert "missing ['layers.2." in message(num_layers=3, window_sizes=[None] * 3)
    assert "not expected ['layers.1." in message(num_layers=1, window_sizes=[None])
    assert "embed_tokens.weight: expected [50, 32], found [48, 32]" in message(vocab_size=50)
    assert "unexpected_field" in message_of_config(path, document, unexpected_field=1)


def message_of_config(path: Path, document: dict, **changes) -> str:
    path.write_text(json.dumps(document | {"model": document["model"] | changes}))
    with pytest.raises(CheckpointError) as caught:
        orbax.load_config(path.parent)
    return str(caught.value)


# Orbax reads in threads; those still running when the first one fails complain to a closed event loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_checkpoints_are_refused(hf_folder, tmp_path):
    source = resolve_model(str(convert(resolve_model(str(hf_folder)), tmp_path / "orbax")))
    config = load_config(source)
    for data in (source.path / "params").rglob("d/*"):
        data.write_bytes(data.read_bytes()[:10])
    with pytest.raises(CheckpointError, match=f"{source.path}/params"):
        load_weights(source, config, dtype="float32")
    (source.path / "params").rename(source.path / "elsewhere")
    with pytest.raises(CheckpointError, match="no readable Orbax checkpoint"):
        load_weights(source, config, dtype="float32")


def test_groups_are_no_larger_than_the_largest_parameter():
    sizes = {"a": 10, "b": 30, "c": 100, "d": 50, "e": 50, "f": 1}
    targets = {name: jax.ShapeDtypeStruct((size,), np.float32) for name, size in sizes.items()}
    groups = [list(group) for group in orbax._groups(targets)]
    assert groups == [["a", "b"], ["c"], ["d", "e"], ["f"]]


def run_program(*arguments: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "scripts/convert_checkpoint.py", *arguments],
        cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_program_converts_the_demo_with_its_tokenizer(demo_source, tmp_path):
    output = tmp_path / "demo"
    done = run_program(f"--model={demo_source.path}", f"--output={output}", "--dtype=bfloat16")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Wrote {output}\n"
    assert "INFO" not in done.stderr and "Loading weights: 100%" in done.stderr
    config = load_config(resolve_model(str(output)))
    assert config.dtype == "bfloat16" and config.num_parameters() == 134_515_008
    assert {"tokenizer.json", "tokenizer_config.json"} <= {p.name for p in output.iterdir()}


def test_the_program_reports_user_errors_in_one_line(tmp_path):
    done = run_program("--model=./nothing-here", f"--output={tmp_path / 'out'}")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --model=./nothing-here: no such file or folder")
    assert done.stderr.count("\n") == 1 and done.stdout == ""
