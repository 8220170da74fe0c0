"""Turns a request's tokens into text as they come, and watches for stop strings."""

import codecs
import dataclasses
from collections.abc import Sequence

from jaxkv.core.request import FinishReason, SamplingParams
from jaxkv.tokenization.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class TextDelta:
    """Text that is certain by now.

    Attributes:
      num_tokens: how many of the tokens fed belong to the output; fewer than given when a stop string came up.
      stop_reason: the stop string, or the id out of stop_token_ids, that ended the output; None otherwise.
    """

    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class OutputText:
    """One request's output text.

    However the tokens are cut into calls, the pieces joined are the same: the text of the output tokens as it follows
    the prompt, up to the first stop string. A stop string is the one that is complete first; of several complete at the
    same character, the longest. What could still become a stop string, or is a part of a UTF-8 sequence, is held
    back until it is decided, at the latest when the request finishes.

    Args:
      prompt_token_ids: what the output follows. A tokenizer that drops the space in front of a text drops it only when
        the prompt holds no text of its own.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, prompt_token_ids: Sequence[int] = ()):
        self._bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if sampling.skip_special_tokens else frozenset()
        self._sampling = sampling
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.token_bytes.strips_leading_space and all(
            i in self._skipped for i in prompt_token_ids
        )
        self._held = ""
        self._num_tokens = 0
        self._finished = False

    def feed(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
    ) -> TextDelta:
        """Takes the next tokens, and the request's end if it came with them.

        Args:
          stop_token_id: the id that ended the request, when one did: then it is the last of token_ids, and not part of
            the text unless include_stop_str_in_output.
        """
        assert not self._finished, "the output has already finished"
        pieces = []
        for count, token_id in enumerate(token_ids, start=1):
            last = count == len(token_ids)
            hidden = last and stop_token_id is not None and not self._sampling.include_stop_str_in_output
            data = b"" if hidden or token_id in self._skipped else self._bytes[token_id]
            self._num_tokens += 1
            text, stop = self._take(self._decode(data))
            pieces.append(text)
            if stop is not None:
                self._finished = True
                return TextDelta("".join(pieces), count, FinishReason.STOP, stop)
        if finish_reason is None:
            return TextDelta("".join(pieces), len(token_ids))
        self._finished = True
        text, stop = self._take(self._utf8.decode(b"", final=True))
        pieces.append(text)
        if stop is not None:
            return TextDelta("".join(pieces), len(token_ids), FinishReason.STOP, stop)
        pieces.append(self._held)
        reason = stop_token_id if stop_token_id in self._sampling.stop_token_ids else None
        return TextDelta("".join(pieces), len(token_ids), finish_reason, reason)

    def _decode(self, data: bytes) -> str:
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def _take(self, text: str) -> tuple[str, str | None]:
        """Adds decoded text; returns what can be handed out, and the stop string if one is complete."""
        stops = self._sampling.stop
        if not stops or not text:
            return text, None
        before, self._held = len(self._held), self._held + text
        # min_tokens holds for stop strings too: none may be completed by the first min_tokens tokens.
        if self._num_tokens > self._sampling.min_tokens:
            found = []
            for stop in stops:
                # Whatever ended inside the held text was looked at already, or came too early to count.
                start = self._held.find(stop, max(0, before - len(stop) + 1))
                if start >= 0:
                    found.append((start + len(stop), start, stop))
            if found:
                end, start, stop = min(found)
                return self._held[: end if self._sampling.include_stop_str_in_output else start], stop
        hold = max(map(self._overlap, stops))
        cut = len(self._held) - hold
        ready, self._held = self._held[:cut], self._held[cut:]
        return ready, None

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that is a proper beginning of `stop`."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0
