"""Log-probabilities as the API shows them: in columns for completions, an entry a token for chat, and prompts' own."""

from collections.abc import Sequence
from typing import Any

from jaxkv.core.request import TokenLogprobs
from jaxkv.server.protocol import GenerationRequest
from jaxkv.tokenization.tokenizer import Tokenizer

# JSON has no -inf; this is what vLLM writes for it.
_LOWEST = -9999.0

Columns = dict[str, list[Any]]


class LogprobsFormat:
    """Writes what one request asked for; a token that lists fewer alternatives than the engine reports has the likeliest."""

    def __init__(self, tokenizer: Tokenizer, body: GenerationRequest):
        self._tokenizer = tokenizer
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._num_top = body.num_logprobs()
        self._num_prompt_top = body.prompt_logprobs

    def columns(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offsets: Sequence[int]
    ) -> Columns:
        """The `logprobs` of completions. A None has no log-probability: a prompt's first token."""
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else max(entry.logprob, _LOWEST) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": list(offsets),
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top[: self._num_top], (entry.token_id, entry.logprob)):
            # Two parts of characters can look alike; the likelier one, which comes first, stays.
            top.setdefault(self._name(token_id), max(logprob, _LOWEST))
        return top

    def chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        """An element of chat's `logprobs.content`."""
        top = [self._chat_token(*pair) for pair in entry.top[: self._num_top]]
        return self._chat_token(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._name(token_id),
            "logprob": max(logprob, _LOWEST),
            "bytes": list(self._tokenizer.token_bytes[token_id]),
        }

    def prompt(self, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: of each token its alternatives and itself, by id; null for the first."""
        return [None if entry is None else self._prompt_token(entry) for entry in entries]

    def _prompt_token(self, entry: TokenLogprobs) -> dict[str, Any]:
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, start=1)]
        return {
            str(token_id): {
                "logprob": max(logprob, _LOWEST),
                "rank": rank,
                "decoded_token": self._tokenizer.token_text(token_id),
            }
            for token_id, logprob, rank in (
                *ranked[: self._num_prompt_top],
                (entry.token_id, entry.logprob, entry.rank),
            )
        }

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)
