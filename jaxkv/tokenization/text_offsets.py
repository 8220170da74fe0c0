"""Where each token begins in a text, in characters. A token begins behind the last character that the tokens before it
complete, so the parts of one character all begin where it does."""

import codecs
from collections.abc import Sequence

from jaxkv.core.request import SamplingParams
from jaxkv.tokenization.output_text import OutputText
from jaxkv.tokenization.tokenizer import Tokenizer


def prompt_offsets(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> list[int]:
    """Offsets of a prompt's tokens in its text.

    What the tokens have and the text has not counts for nothing: a bos_token that encoding added, special tokens that
    decoding left out, the space that a sentencepiece model puts in front.
    """
    offsets, position = [], 0
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    at_start = tokenizer.token_bytes.strips_leading_space
    for token_id in token_ids:
        offsets.append(position)
        special = token_id in tokenizer.special_ids
        if special and not text.startswith(tokenizer.token_text(token_id), position):
            continue
        piece = utf8.decode(tokenizer.token_bytes[token_id])
        in_text = not at_start and (text.startswith(piece, position) or not text.startswith(piece[1:], position))
        position += len(piece) - (piece.startswith(" ") and not in_text)
        at_start = False
    return offsets


class OutputOffsets:
    """Offsets of output tokens, told one by one.

    Args:
      prompt_token_ids: what the output follows. start: offset of the first token.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool, start: int = 0
    ):
        # Without stop strings: text that is held back, or cut off behind a stop string, counts too.
        self._text = OutputText(tokenizer, SamplingParams(skip_special_tokens=skip_special_tokens), prompt_token_ids)
        self._position = start

    def next(self, token_id: int) -> int:
        position = self._position
        self._position += len(self._text.feed((token_id,)).text)
        return position
