"""transformers on torch, with the very weights that jaxkv loads: its `generate`, and its continuous batching."""

import numpy as np
import torch
import transformers

from benchlib.contenders import Prompts, Timing, check_lengths, timed
from jaxkv.loading.resolve import ModelSource, resolve_model
from jaxkv.loading.weights import open_tensors

_PAGE = 64


def hugging_face_config(source: ModelSource) -> transformers.PretrainedConfig:
    """transformers' own reading of the checkpoint's configuration."""
    folder, gguf_file = (source.path.parent, source.path.name) if source.kind == "gguf" else (source.path, None)
    return transformers.AutoConfig.from_pretrained(folder, gguf_file=gguf_file)


def _torch_model(model: str, dtype: str) -> transformers.PreTrainedModel:
    """One for each contender: continuous batching changes the attention of the model that it is given."""
    source = resolve_model(model)
    config = hugging_face_config(source)
    torch_model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    tensors = open_tensors(source)
    weights = {name: torch.from_numpy(tensors.read(name, np.dtype("float32"))) for name in tensors.names()}
    missing, unexpected = torch_model.load_state_dict(weights, strict=False)
    if unexpected or not set(missing) <= {"lm_head.weight"}:
        raise RuntimeError(f"transformers' model takes other tensors: {missing=}, {unexpected=}")
    torch_model.tie_weights()
    return torch_model.eval()


class Generate:
    """`model.generate` on the whole batch: static batching, one prompt length."""

    def __init__(self, model: str, dtype: str):
        self._model = _torch_model(model, dtype)

    def generate(self, prompts: Prompts, output_len: int) -> Timing:
        ids = torch.tensor(prompts)
        settings = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": output_len,
            "min_new_tokens": output_len,
            "do_sample": False,
            "pad_token_id": 0,
        }
        with torch.inference_mode():
            outputs, timing = timed(lambda: self._model.generate(ids, **settings))
        check_lengths([len(row) - ids.shape[1] for row in outputs], len(prompts), output_len)
        return timing

    def close(self) -> None:
        self._model = None


class ContinuousBatching:
    """`model.generate_batch`: paged cache and continuous batching.

    Left to itself it sizes its cache to 90 % of the machine's memory, so the sizes are given: what the workload needs,
    one page a request to spare.
    """

    def __init__(self, model: str, dtype: str, *, max_num_seqs: int, max_model_len: int):
        self._model = _torch_model(model, dtype)
        self._settings = transformers.ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=max(96, max_num_seqs * (-(-max_model_len // _PAGE) + 1)),
            max_batch_tokens=2048,
            allow_block_sharing=False,
        )

    def generate(self, prompts: Prompts, output_len: int) -> Timing:
        generation = transformers.GenerationConfig(
            max_new_tokens=output_len, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        outputs, timing = timed(
            lambda: self._model.generate_batch(
                prompts, generation_config=generation, continuous_batching_config=self._settings
            )
        )
        check_lengths([len(output.generated_tokens) for output in outputs.values()], len(prompts), output_len)
        return timing

    def close(self) -> None:
        self._model = None
