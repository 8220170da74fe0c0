"""The bytes behind each token id, for the two families of tokenizers that Llama-like models use.

Joining bytes and decoding them as UTF-8 is exact in any split and costs the same for each token, where decoding windows
of ids costs more the longer an invalid sequence gets and can contradict text that was already handed out.
"""

import json
import re

import tokenizers

from jaxkv.core.errors import CheckpointError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE writes printable Latin-1 bytes as themselves and the others, in order, from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


class ByteTokens:
    """Maps ids to bytes.

    Attributes:
      strips_leading_space: the decoder drops one space at the start of a text (the space a sentencepiece model puts
        in front of it when encoding).

    Raises:
      CheckpointError: the tokenizer decodes in a way that is not known to be one of the two families.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, origin: str):
        self._tokenizer = tokenizer
        self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        self._known: dict[int, bytes] = {}
        steps = _decoder_steps(tokenizer)
        names = [step["type"] for step in steps]
        self._byte_level = names == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in names
        self.strips_leading_space = False
        for step in steps:
            if step["type"] == "Strip" and step["content"] == " " and step["start"] == 1 and step["stop"] == 0:
                self.strips_leading_space = True
            elif step["type"] == "Metaspace" and step["replacement"] == "▁":
                self.strips_leading_space = step.get("prepend_scheme", "always") != "never"
            elif step["type"] == "Replace" and step["pattern"] == {"String": "▁"} and step["content"] == " ":
                pass
            elif step["type"] not in ("ByteLevel", "ByteFallback", "Fuse"):
                raise CheckpointError(
                    f"{origin}: tokenizer decoder {step['type']} ({step}) is not supported; "
                    "byte-level and sentencepiece tokenizers are"
                )
        if not names or ("ByteLevel" in names and not self._byte_level):
            raise CheckpointError(
                f"{origin}: tokenizer decoder {names} is not supported; expected ByteLevel alone or "
                "a sentencepiece sequence (Replace, ByteFallback, Fuse, Strip)"
            )

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes; empty for an id that the tokenizer does not know (padding of the vocabulary)."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._bytes(token_id)
        return known

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            values = [_ALPHABET.get(character) for character in piece]
            return piece.encode() if None in values else bytes(values)
        if self._byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return piece.replace("▁", " ").encode()


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict]:
    if tokenizer.decoder is None:
        return []
    # The pickled form is the decoder's JSON alone; Tokenizer.to_str() writes the vocabulary too (9 MB for Llama 3).
    state = json.loads(tokenizer.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]
