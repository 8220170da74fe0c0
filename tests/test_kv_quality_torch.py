"""The cost of KV formats, against transformers' torch model with keys (after RoPE) and values rounded as they do.

Nothing of the cache, its formats or its attention is shared: the rounding is written down a second time.
"""

import numpy as np
import pytest

pytest.importorskip("torch", reason="the oracle is transformers' torch model")

import torch
from transformers.models.llama import modeling_llama

from jaxkv.kv_quality import KVVariant, token_figures
from tests.support import torch_oracle
from tests.support.demo import demo_source, demo_text_ids, demo_weights

NUM_TOKENS = 384


def rounded_up(scale: torch.Tensor) -> torch.Tensor:
    """To the next bfloat16, unless it is one."""
    nearest = scale.bfloat16()
    above = torch.nextafter(nearest, torch.full_like(nearest, torch.inf))
    return torch.where(nearest.float() < scale, above, nearest).float()


def int8(x: torch.Tensor) -> torch.Tensor:
    scale = rounded_up(x.abs().amax(-1, keepdim=True) / 127)
    return (x / scale).round() * scale


def fp8_e4m3(x: torch.Tensor) -> torch.Tensor:
    scale = rounded_up(x.abs().amax(-1, keepdim=True) / 448)
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def int4(x: torch.Tensor) -> torch.Tensor:
    groups = x.unflatten(-1, (-1, 32))
    zero = groups.amin(-1, keepdim=True).bfloat16().float()
    scale = rounded_up((groups.amax(-1, keepdim=True) - zero) / 15)
    codes = ((groups - zero) / scale).round().clamp(0, 15)
    return (codes * scale + zero).flatten(-2)


ROUNDING = {"int8": (int8, int8), "fp8_e4m3": (fp8_e4m3, fp8_e4m3), "int8,int4": (int8, int4), "int4": (int4, int4)}


def log_probs(ids, monkeypatch, keys=None, values=None) -> np.ndarray:
    """f64[n, V] of the demo model with such keys and values."""
    attend = modeling_llama.eager_attention_forward

    def attend_to_rounded(module, query, key, value, *args, **kwargs):
        return attend(module, query, keys(key), values(value), *args, **kwargs)

    with monkeypatch.context() as patch:
        if keys is not None:
            patch.setattr(modeling_llama, "eager_attention_forward", attend_to_rounded)
        logits = torch_oracle.logits(torch_oracle.demo_model(demo_source().path), ids)
    return torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()


def test_formats_cost_what_they_cost_in_torch(monkeypatch):
    ids = demo_text_ids(NUM_TOKENS)
    assert len(ids) == NUM_TOKENS
    after = np.arange(NUM_TOKENS - 1), np.array(ids[1:])
    base = log_probs(ids, monkeypatch)
    model = demo_weights()
    variants = [KVVariant(name, model, name) for name in ROUNDING]
    figures = token_figures(KVVariant("float32", model, "float32"), variants, ids)
    for variant, found in zip(variants, figures, strict=True):
        ours = log_probs(ids, monkeypatch, *ROUNDING[variant.name])
        kl = (np.exp(base) * (base - ours)).sum(axis=-1)
        assert found.kl.mean() == pytest.approx(kl.mean(), rel=0.03), variant.name
        assert np.corrcoef(np.log(found.kl), np.log(kl))[0, 1] > 0.99, variant.name
        assert (found.agrees != (base.argmax(axis=-1) == ours.argmax(axis=-1))).mean() < 0.01, variant.name
        np.testing.assert_allclose(found.base_nll, -base[after], atol=1e-3)
        assert found.nll.mean() == pytest.approx(-ours[after].mean(), abs=1e-3), variant.name
