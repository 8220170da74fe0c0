"""A damaged checkpoint is refused before the minutes that compiling takes."""

import pytest

from jaxkv import startup
from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import CheckpointError
from jaxkv.loading.model_config import parse_hf_config


class CompiledError(Exception):
    pass


def started(folder, monkeypatch):
    def compile_nothing(*_):
        raise CompiledError

    monkeypatch.setattr(startup, "plan_programs", compile_nothing)
    monkeypatch.setattr(startup, "load_tokenizer", lambda *_: None)
    startup.start_engine(EngineConfig(model=str(folder), compilation_cache_dir=""))


def test_damage_is_found_first(tiny_config, random_tensors, write_folder, monkeypatch):
    tensors = random_tensors(parse_hf_config(tiny_config, "test"))
    folder = write_folder(tiny_config, tensors)
    with pytest.raises(CompiledError):  # whole, it gets as far as the compiler
        started(folder, monkeypatch)

    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors.*ends at byte"):
        started(folder, monkeypatch)

    tensors.pop("model.norm.weight")
    with pytest.raises(CheckpointError, match="model.norm.weight"):
        started(write_folder(tiny_config, tensors, name="missing"), monkeypatch)
