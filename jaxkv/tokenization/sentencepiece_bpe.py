"""BPE in sentencepiece's dialect (Llama 1 and 2, Mistral): scores instead of merges, "▁" for a space, byte fallback.

The model file is a protobuf message; the few fields needed are read here, so that neither sentencepiece nor protobuf
has to be installed.
"""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from jaxkv.core.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of pieces: the same numbers in sentencepiece and in GGUF's tokenizer.ggml.token_type."""


def sentencepiece_bpe(
    pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int], add_space_prefix: bool
) -> tokenizers.Tokenizer:
    """A tokenizer that merges as sentencepiece does: of all neighbours that form a piece, the best score first.

    Args:
      pieces, scores, kinds: one entry an id.
      add_space_prefix: put a space in front of each stretch of plain text.
    """
    vocab = {piece: i for i, piece in enumerate(pieces)}
    unknown = next((pieces[i] for i, kind in enumerate(kinds) if kind == UNKNOWN), None)
    steps = [normalizers.Prepend("▁")] if add_space_prefix else []
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast = tokenizers.Tokenizer(
        models.BPE(
            vocab, _merges(pieces, scores, kinds), unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in set(kinds)
        )
    )
    fast.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(decoder + ([decoders.Strip(" ", 1, 0)] if add_space_prefix else []))
    add_control_tokens(fast, pieces, kinds)
    return fast


def add_control_tokens(fast: tokenizers.Tokenizer, pieces: Sequence[str], kinds: Sequence[int]) -> None:
    """Makes control and user-defined pieces match whole, before anything is merged; control ones are special."""
    fast.add_special_tokens(
        [AddedToken(pieces[i], normalized=False) for i, kind in enumerate(kinds) if kind in (CONTROL, UNKNOWN)]
    )
    fast.add_tokens([AddedToken(pieces[i], normalized=False) for i, kind in enumerate(kinds) if kind == USER_DEFINED])


def _merges(pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to put a normal piece together from two others, best score first (ties: lower id, shorter left)."""
    known = {piece for piece, kind in zip(pieces, kinds) if kind == NORMAL}
    order = sorted((-scores[i], i) for i, kind in enumerate(kinds) if kind == NORMAL and len(pieces[i]) > 1)
    return [
        (piece[:cut], piece[cut:])
        for piece in (pieces[i] for _, i in order)
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]


def sentencepiece_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Tokenizer of a sentencepiece `.model` file, and its bos/eos/unk tokens by name.

    Raises:
      CheckpointError: damaged, or not a BPE model.
    """
    pieces, scores, kinds = [], [], []
    model_type, add_dummy_prefix, remove_extra_whitespaces = 1, True, True
    try:
        for field, value in _fields(path.read_bytes()):
            if field == 1:
                piece = dict(_fields(value))
                pieces.append(piece[1].decode())
                scores.append(struct.unpack("<f", piece.get(2, bytes(4)))[0])
                kinds.append(piece.get(3, NORMAL))
            elif field == 2:
                model_type = dict(_fields(value)).get(3, 1)
            elif field == 3:
                spec = dict(_fields(value))
                add_dummy_prefix = bool(spec.get(3, True))
                remove_extra_whitespaces = bool(spec.get(4, True))
    except (IndexError, KeyError, UnicodeDecodeError, struct.error, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged sentencepiece model, or another kind of file: {error!r}") from error
    if model_type != 2 or remove_extra_whitespaces:
        found = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}.get(model_type, model_type)
        raise CheckpointError(
            f"{path}: a sentencepiece model of type {found} with "
            f"remove_extra_whitespaces={remove_extra_whitespaces} is not supported; expected BPE without it "
            "(Llama, Mistral), or a tokenizer.json beside it"
        )
    special = {}
    for i, kind in enumerate(kinds):
        name = {"<s>": "bos_token", "</s>": "eos_token"}.get(pieces[i]) if kind == CONTROL else None
        name = "unk_token" if kind == UNKNOWN else name
        if name:
            special[name] = pieces[i]
    return sentencepiece_bpe(pieces, scores, kinds, add_dummy_prefix), special


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a protobuf message: an int for varints, bytes for everything else."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        field, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at)
        else:
            if wire == 2:
                size, at = _varint(data, at)
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
            else:
                raise KeyError(f"protobuf wire type {wire}")
            value, at = data[at : at + size], at + size
            if len(value) != size:
                raise IndexError("truncated")
        yield field, value
