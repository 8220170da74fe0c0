"""transformers' torch models in float32, eager attention. Only test_*_torch.py and make_golden.py import this."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def torch_config(hf_config: dict[str, Any]) -> transformers.PretrainedConfig:
    fields = {name: value for name, value in hf_config.items() if name not in ("model_type", "torch_dtype")}
    return transformers.AutoConfig.for_model(hf_config["model_type"], **fields)


def torch_model(hf_config: dict[str, Any], tensors: dict[str, np.ndarray], *, max_model_len: int) -> torch.nn.Module:
    """The torch model with these weights; `dynamic` RoPE has the one base that follows from max_model_len."""
    model = transformers.AutoModelForCausalLM.from_config(
        torch_config(hf_config), attn_implementation="eager", dtype=torch.float32
    ).eval()
    state = {name: torch.from_numpy(tensor.copy()) for name, tensor in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    fix_dynamic_rope(model, max_model_len)
    return model


def rope_parameters(config: transformers.PretrainedConfig, max_model_len: int) -> tuple[np.ndarray, float]:
    """transformers' inverse frequencies f32[D/2] and attention factor."""
    if config.rope_parameters["rope_type"] == "dynamic":
        dynamic = ROPE_INIT_FUNCTIONS["dynamic"]
        frequencies, factor = dynamic(config, torch.device("cpu"), seq_len=max_model_len)
    else:
        rotary = LlamaRotaryEmbedding(config)
        frequencies, factor = rotary.inv_freq, rotary.attention_scaling
    return frequencies.float().numpy(), float(factor)


def fix_dynamic_rope(model: torch.nn.Module, max_model_len: int) -> None:
    rotary = model.model.rotary_emb
    if rotary.rope_type == "dynamic":
        frequencies, _ = rope_parameters(model.config, max_model_len)
        rotary.inv_freq = torch.from_numpy(frequencies)
        rotary.rope_type = "default"  # no update as the sequence grows


@torch.no_grad()
def logits(model: torch.nn.Module, token_ids: tuple[int, ...]) -> np.ndarray:
    """f32[n, V] of one sequence in one pass."""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].float().numpy()


@functools.lru_cache
def demo_model(gguf_path: Path) -> torch.nn.Module:
    """The demo model, read by transformers' own GGUF code (from_pretrained around it wants accelerate)."""
    fields = load_gguf_checkpoint(gguf_path, return_tensors=False)["config"]
    config = transformers.LlamaConfig(**{k: v for k, v in fields.items() if not k.startswith("_")})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tensors = load_gguf_checkpoint(gguf_path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its buffers are not in the state
    return model
