"""The shape of a model by what --model says: a known name, or whatever has a config.json."""

import pathlib

from gpulib.step_programs import MODELS

from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import ConfigError
from jaxkv.core.model_config import ModelConfig
from jaxkv.loading.resolve import resolve_model
from jaxkv.loading.weights import load_config

# Whole models; --shards of plan_capacity cuts them.
SHAPES = {name: model for name, model in MODELS.items() if "/" not in name}


def find_shape(config: EngineConfig) -> tuple[str, ModelConfig]:
    """Name and shape: one of SHAPES, or what a config.json says; what exists on disk wins.

    Raises UserError for what is neither.
    """
    if not config.model:
        raise ConfigError(f"model is empty: name a config.json, a folder, a repo id, demo, {' or '.join(SHAPES)}")
    if config.model.lower() in SHAPES and not pathlib.Path(config.model).exists():
        return config.model.lower(), SHAPES[config.model.lower()]
    where = {"revision": config.revision, "download_dir": config.download_dir}
    source = resolve_model(config.model, **where, config_only=True)
    return source.name, load_config(source)
