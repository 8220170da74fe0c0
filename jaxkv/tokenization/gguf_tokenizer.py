"""The tokenizer inside a GGUF file, rebuilt with the tokenizers library from the file's metadata.

transformers' own conversion needs torch and drops SmolLM's digit splitting.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxkv.core.errors import CheckpointError
from jaxkv.loading.gguf_file import read_gguf_file
from jaxkv.tokenization.sentencepiece_bpe import NORMAL, add_control_tokens, sentencepiece_bpe
from jaxkv.tokenization.tokenizer import Tokenizer

# How each family cuts text before merging, as the models' own tokenizer.json files have it.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Cuts one after the other. "default" is what llama.cpp applies to files that were written before the name existed.
_STAGES = {
    "falcon": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"[0-9][0-9][0-9]"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "tekken": (_TEKKEN,),
}

_GPT2_NAMES = ("gpt-2", "phi-2", "olmo")
_SMOLLM_NAMES = ("smollm", "starcoder", "refact", "codeshell")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen", "stablelm2")
PRE_TOKENIZERS = (*_GPT2_NAMES, *_SMOLLM_NAMES, *_LLAMA3_NAMES, *_QWEN2_NAMES, *_STAGES)
"""Values of tokenizer.ggml.pre that are understood."""

# llama.cpp looks whole words up before it merges for these, and starts texts with bos unless the file says otherwise.
_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"}


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _GPT2_NAMES:
        return gpt2
    if name in _SMOLLM_NAMES:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    stages = _STAGES.get(name) or (_LLAMA3 if name in _LLAMA3_NAMES else _QWEN2,)
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in stages]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _byte_level_bpe(path: Path, fields: dict[str, Any], pieces: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
    name = fields.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.pre is {name!r}, which is not supported (a wrong guess would cut text wrongly); "
            f"supported: {', '.join(PRE_TOKENIZERS)}. Set tokenizer to a folder with the model's tokenizer.json"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges", ())]
    if not merges or any(len(merge) != 2 for merge in merges):
        raise CheckpointError(f"{path}: tokenizer.ggml.merges is missing or damaged ({len(merges)} entries)")
    vocab = {piece: i for i, piece in enumerate(pieces)}
    try:
        fast = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=name in _WHOLE_WORDS_FIRST))
    except Exception as error:  # the library raises bare Exception, here for a merge of unknown pieces
        raise CheckpointError(f"{path}: tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from error
    if name in _QWEN2_NAMES:
        fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = _pre_tokenizer(name)
    fast.decoder = decoders.ByteLevel()
    add_control_tokens(fast, pieces, kinds)
    return fast


def gguf_tokenizer(path: str | Path, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Args:
      chat_template: Jinja text that replaces the file's own.

    Raises:
      CheckpointError: no vocabulary in the file, or a kind of tokenizer that is not supported.
    """
    path = Path(path)
    fields = read_gguf_file(path).metadata
    model = fields.get("tokenizer.ggml.model")
    pieces = fields.get("tokenizer.ggml.tokens")
    if not pieces:
        raise CheckpointError(f"{path}: no vocabulary in the file (tokenizer.ggml.tokens); set tokenizer to a folder")
    kinds = fields.get("tokenizer.ggml.token_type") or [NORMAL] * len(pieces)
    if len(kinds) != len(pieces):
        raise CheckpointError(f"{path}: {len(pieces)} tokens but {len(kinds)} entries in tokenizer.ggml.token_type")
    if model == "gpt2":
        fast = _byte_level_bpe(path, fields, pieces, kinds)
        adds_bos = fields.get("tokenizer.ggml.pre") in _WHOLE_WORDS_FIRST
    elif model == "llama":
        scores = fields.get("tokenizer.ggml.scores") or []
        if len(scores) != len(pieces):
            raise CheckpointError(f"{path}: {len(pieces)} tokens but {len(scores)} entries in tokenizer.ggml.scores")
        fast = sentencepiece_bpe(pieces, scores, kinds, fields.get("tokenizer.ggml.add_space_prefix", True))
        adds_bos = True
    else:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model is {model!r}; supported: gpt2 (byte-level BPE), llama (sentencepiece BPE)"
        )
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {}
    for name, key in names.items():
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(pieces):
            special[name] = pieces[token_id]
    if fields.get("tokenizer.ggml.add_bos_token", adds_bos) and (bos := special.get("bos_token")):
        fast.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, fast.token_to_id(bos))]
        )
    return Tokenizer(
        fast,
        special_tokens=special,
        chat_template=chat_template or fields.get("tokenizer.chat_template"),
        origin=str(path),
    )


def save_pretrained_from_gguf(gguf_path: str | Path, out_dir: str | Path) -> None:
    """Writes a GGUF file's tokenizer as a Hugging Face folder: tokenizer.json and tokenizer_config.json."""
    tokenizer = gguf_tokenizer(gguf_path)
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.fast.save(str(out_dir / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokenizer.special_tokens,
        "add_bos_token": tokenizer.adds_bos,
        "clean_up_tokenization_spaces": False,
        "chat_template": tokenizer.chat_template,
    }
    (out_dir / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
