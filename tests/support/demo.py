"""The demo model, found once a test run."""

import functools

import numpy as np

from jaxkv.core.model_config import ModelConfig
from jaxkv.loading.resolve import ModelSource, resolve_model
from jaxkv.loading.weights import load_config, load_weights, open_tensors
from jaxkv.models.llama import Llama
from jaxkv.tokenization.tokenizer import Tokenizer, load_tokenizer
from tests.support.dense_model import DenseModel
from tests.support.text import TEXT


@functools.lru_cache
def demo_source() -> ModelSource:
    return resolve_model("demo")


@functools.lru_cache
def demo_config() -> ModelConfig:
    return load_config(demo_source())


@functools.lru_cache
def demo_weights(dtype: str = "float32") -> Llama:
    return load_weights(demo_source(), demo_config(), dtype=dtype)


@functools.lru_cache(maxsize=1)
def demo_dense_model() -> DenseModel:
    tensors = open_tensors(demo_source())
    return DenseModel(demo_config(), {name: tensors.read(name, np.dtype("float32")) for name in tensors.names()})


@functools.lru_cache
def demo_tokenizer() -> Tokenizer:
    return load_tokenizer(demo_source(), None, None)


def demo_text_ids(count: int = 320) -> tuple[int, ...]:
    """The first tokens of TEXT."""
    return tuple(demo_tokenizer().encode(TEXT, add_special_tokens=False)[:count])
