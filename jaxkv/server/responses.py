"""Builds the OpenAI API's response objects, whole ones and stream chunks, from token deltas."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxkv.async_engine import TokenDelta
from jaxkv.core.request import FinishReason, TokenLogprobs
from jaxkv.server.protocol import CompletionRequest, GenerationRequest
from jaxkv.server.serving import Prompt
from jaxkv.tokenization.tokenizer import Tokenizer

# JSON has no -inf; this is what vLLM writes for it.
_LOWEST_LOGPROB = -9999.0


@dataclasses.dataclass
class Choice:
    """One sequence so far.

    Attributes:
      offset: characters of text before the next token (for text_offset).
    """

    deltas: list[TokenDelta] = dataclasses.field(default_factory=list)
    offset: int = 0


class Usage:
    """Token counts over all sequences; a prompt is counted once, however many sequences continue it."""

    def __init__(self, prompts: Sequence[Prompt], num_choices: int):
        self._prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._num_choices = num_choices
        self._completion_tokens = 0
        self._cached: dict[int, int] = {}

    def add(self, delta: TokenDelta) -> None:
        self._completion_tokens += len(delta.token_ids)
        if delta.index % self._num_choices == 0:
            self._cached[delta.index] = delta.num_cached_tokens

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


class Responses(abc.ABC):
    """The format of one API; `CompletionResponses` and `ChatResponses` fill it in.

    Args:
      model: the name shown. created: Unix time in seconds.
    """

    id_prefix: str
    object_name: str
    chunk_name: str

    def __init__(
        self, response_id: str, model: str, created: int, tokenizer: Tokenizer, body: GenerationRequest,
        prompts: Sequence[Prompt],
    ):  # fmt: skip
        self.response_id, self.model, self.created = response_id, model, created
        self.tokenizer, self.body = tokenizer, body
        self.usage = Usage(prompts, body.num_choices)
        self.choices = [Choice() for _ in range(len(prompts) * body.num_choices)]

    def whole(self) -> dict[str, Any]:
        """The response, once every delta has been added."""
        choices = [self.choice(index, choice.deltas) for index, choice in enumerate(self.choices)]
        return self._frame(self.object_name, choices) | {"usage": self.usage.body()}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._frame(self.chunk_name, choices) | ({"usage": None} if self.body.include_usage else {})

    def usage_chunk(self) -> dict[str, Any]:
        return self._frame(self.chunk_name, []) | {"usage": self.usage.body()}

    def _frame(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.response_id, "object": name, "created": self.created, "model": self.model, "choices": choices
        }  # fmt: skip

    @abc.abstractmethod
    def first_chunks(self) -> list[dict[str, Any]]:
        """Chunks that come before any token."""

    @abc.abstractmethod
    def choice(self, index: int, deltas: Sequence[TokenDelta]) -> dict[str, Any]:
        """A whole choice out of all its deltas."""

    @abc.abstractmethod
    def chunk_choice(self, delta: TokenDelta) -> dict[str, Any]:
        """The choice in the stream's chunk for one delta."""


def _end(deltas: Sequence[TokenDelta]) -> dict[str, Any]:
    last = deltas[-1]
    reason = last.finish_reason
    return {
        "finish_reason": None if reason is None else (FinishReason(reason).value),
        "stop_reason": last.stop_reason,
    }


class CompletionResponses(Responses):
    id_prefix = "cmpl"
    object_name = chunk_name = "text_completion"

    def __init__(self, response_id, model, created, tokenizer, body: CompletionRequest, prompts: Sequence[Prompt]):
        super().__init__(response_id, model, created, tokenizer, body, prompts)
        self._echoes = [
            self._echo(prompts[i // body.num_choices]) if body.echo else "" for i in range(len(self.choices))
        ]
        for choice, echo in zip(self.choices, self._echoes, strict=True):
            choice.offset = len(echo)

    def _echo(self, prompt: Prompt) -> str:
        return self.tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text

    def first_chunks(self) -> list[dict[str, Any]]:
        return [
            self.chunk([{"index": i, "text": echo, "logprobs": None, "finish_reason": None, "stop_reason": None}])
            for i, echo in enumerate(self._echoes)
            if echo
        ]

    def choice(self, index: int, deltas: Sequence[TokenDelta]) -> dict[str, Any]:
        text = self._echoes[index] + "".join(delta.text for delta in deltas)
        return {"index": index, "text": text, "logprobs": self._logprobs(index, deltas), **_end(deltas)}

    def chunk_choice(self, delta: TokenDelta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.index, [delta]),
            **_end([delta]),
        }

    def _logprobs(self, index: int, deltas: Sequence[TokenDelta]) -> dict[str, Any] | None:
        if self.body.num_logprobs() is None:
            return None
        result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        choice = self.choices[index]
        for delta in deltas:
            if (entry := delta.logprobs) is not None:
                text = self.tokenizer.token_text(entry.token_id)
                top: dict[str, float] = {}
                for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
                    # Two parts of characters can look alike; the likelier one, which comes first, stays.
                    top.setdefault(self.tokenizer.token_text(token_id), max(logprob, _LOWEST_LOGPROB))
                result["tokens"].append(text)
                result["token_logprobs"].append(max(entry.logprob, _LOWEST_LOGPROB))
                result["top_logprobs"].append(top)
                result["text_offset"].append(choice.offset)
                choice.offset += len(text)
        return result


class ChatResponses(Responses):
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def first_chunks(self) -> list[dict[str, Any]]:
        return [
            self.chunk(
                [{"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}]
            )
            for i in range(len(self.choices))
        ]

    def choice(self, index: int, deltas: Sequence[TokenDelta]) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(delta.text for delta in deltas), "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(deltas), **_end(deltas)}

    def chunk_choice(self, delta: TokenDelta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
        return {"index": delta.index, "delta": content, "logprobs": self._logprobs([delta]), **_end([delta])}

    def _logprobs(self, deltas: Sequence[TokenDelta]) -> dict[str, Any] | None:
        if self.body.num_logprobs() is None:
            return None
        return {"content": [self._token(delta.logprobs) for delta in deltas if delta.logprobs is not None]}

    def _token(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._entry(token_id, logprob) for token_id, logprob in entry.top]
        return self._entry(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.tokenizer.token_text(token_id),
            "logprob": max(logprob, _LOWEST_LOGPROB),
            "bytes": list(self.tokenizer.token_bytes[token_id]),
        }
