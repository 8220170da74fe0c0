"""Regenerates the arrays in this folder with transformers' torch models: python tests/golden/make_golden.py.

Needs torch, and the repository on PYTHONPATH.
"""

from pathlib import Path

import numpy as np

from tests.support import torch_oracle
from tests.support.config_matrix import GOLDEN, GOLDEN_POSITIONS, MATRIX, MAX_MODEL_LEN, PROMPT
from tests.support.demo import demo_source, demo_text_ids
from tests.support.tiny_models import parse, random_tensors

FOLDER = Path(__file__).parent
# Every 1000th logit; the best one is stored for every position.
DEMO_COLUMNS = slice(0, None, 1000)
DEMO_POSITIONS = slice(0, None, 8)


def tiny_logits() -> dict[str, np.ndarray]:
    arrays = {}
    for name in GOLDEN:
        tensors = random_tensors(parse(MATRIX[name]))
        model = torch_oracle.torch_model(MATRIX[name], tensors, max_model_len=MAX_MODEL_LEN)
        arrays[name] = torch_oracle.logits(model, PROMPT)[list(GOLDEN_POSITIONS)]
    return arrays


def rope_frequencies() -> dict[str, np.ndarray]:
    """Frequencies f32[D/2] and, last, the factor on cos and sin."""
    arrays = {}
    for name, hf_config in MATRIX.items():
        frequencies, factor = torch_oracle.rope_parameters(torch_oracle.torch_config(hf_config), MAX_MODEL_LEN)
        arrays[name] = np.append(frequencies, np.float32(factor))
    return arrays


def demo_logits() -> dict[str, np.ndarray]:
    ids = demo_text_ids()
    logits = torch_oracle.logits(torch_oracle.demo_model(demo_source().path), ids)
    return {
        "token_ids": np.asarray(ids, np.int32),
        "logits": logits[DEMO_POSITIONS, DEMO_COLUMNS],
        "best": logits.argmax(-1).astype(np.int32),
        "best_logit": logits.max(-1),
    }


if __name__ == "__main__":
    np.savez_compressed(FOLDER / "tiny_logits.npz", **tiny_logits())
    np.savez_compressed(FOLDER / "rope_frequencies.npz", **rope_frequencies())
    np.savez_compressed(FOLDER / "demo_logits.npz", **demo_logits())
