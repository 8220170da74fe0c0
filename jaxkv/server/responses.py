"""Builds the OpenAI API's response objects, whole ones and stream chunks, from token deltas."""

import abc
from collections.abc import Iterator, Sequence
from typing import Any

from jaxkv.async_engine import TokenDelta
from jaxkv.core.request import FinishReason, TokenLogprobs
from jaxkv.server.logprobs import Columns, LogprobsFormat
from jaxkv.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from jaxkv.server.serving import Prompt
from jaxkv.server.tool_parser import ToolCallParser
from jaxkv.tokenization.text_offsets import OutputOffsets, prompt_offsets
from jaxkv.tokenization.tokenizer import Tokenizer


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

    Either every delta is given to `add`, and `whole` makes the response; or `chunks` for each delta, then `usage_chunk`
    if asked for make the stream.

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
        self.tokenizer, self.body, self.prompts = tokenizer, body, prompts
        self.usage = Usage(prompts, body.num_choices)
        self.logprobs = LogprobsFormat(tokenizer, body)
        self._deltas: list[list[TokenDelta]] = [[] for _ in range(len(prompts) * body.num_choices)]
        self._prompt_logprobs: dict[int, Sequence[TokenLogprobs | None]] = {}
        """By the prompt's index; those of several sequences come with one of them."""
        self._begun: set[int] = set()

    def add(self, delta: TokenDelta) -> None:
        self._see(delta)
        self._deltas[delta.index].append(delta)

    def _see(self, delta: TokenDelta) -> None:
        self.usage.add(delta)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[self.prompt_index(delta.index)] = delta.prompt_logprobs

    def prompt_index(self, index: int) -> int:
        """Which prompt the sequence `index` continues."""
        return index // self.body.num_choices

    def whole(self) -> dict[str, Any]:
        choices = [self.choice(index, deltas) for index, deltas in enumerate(self._deltas)]
        return self._frame(self.object_name, choices) | {"usage": self.usage.body()}

    def chunks(self, delta: TokenDelta) -> Iterator[dict[str, Any]]:
        """The stream's chunks for one delta. What begins a sequence waits for its first token, whose time clients take
        from the first chunk."""
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            yield from self.beginning(delta.index)
        self._see(delta)
        yield self.chunk(self.chunk_choice(delta))

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        frame = self._frame(self.chunk_name, [choice])
        if self.body.include_usage:
            frame["usage"] = self.usage.body() if self.body.continuous_usage else None
        return frame

    def usage_chunk(self) -> dict[str, Any]:
        return self._frame(self.chunk_name, []) | {"usage": self.usage.body()}

    def _frame(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.response_id, "object": name, "created": self.created, "model": self.model, "choices": choices
        }  # fmt: skip

    def token_ids(self, deltas: Sequence[TokenDelta]) -> dict[str, Any]:
        """The choice's entry for them, if asked for."""
        return {"token_ids": [i for delta in deltas for i in delta.token_ids]} if self.body.return_token_ids else {}

    @abc.abstractmethod
    def beginning(self, index: int) -> Iterator[dict[str, Any]]:
        """Chunks that come before a sequence's first token."""

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
    body: CompletionRequest

    def __init__(self, response_id, model, created, tokenizer, body: CompletionRequest, prompts: Sequence[Prompt]):
        super().__init__(response_id, model, created, tokenizer, body, prompts)
        self._echoes = [self._echo(prompt) for prompt in prompts] if body.echo else [""] * len(prompts)
        self._offsets = [self._output_offsets(i) for i in range(len(self._deltas))] if body.logprobs is not None else []
        self._held: dict[int, list[TokenDelta]] = {i: [] for i in range(len(prompts))} if body.echoes_logprobs else {}
        """Deltas of prompts whose log-probabilities have not come: those of one sequence may be faster than the
        prompt, which comes with another."""

    def _echo(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self.tokenizer.decode(prompt.token_ids, self.body.skips_special_tokens)

    def _output_offsets(self, index: int) -> OutputOffsets:
        prompt = self.prompt_index(index)
        return OutputOffsets(
            self.tokenizer, self.prompts[prompt].token_ids,
            skip_special_tokens=self.body.skips_special_tokens, start=len(self._echoes[prompt]),
        )  # fmt: skip

    def add(self, delta: TokenDelta) -> None:
        super().add(self._shown(delta))

    def _shown(self, delta: TokenDelta) -> TokenDelta:
        if not self.body.echoes_only:
            return delta
        return delta._replace(token_ids=(), text="", logprobs=None, finish_reason=FinishReason.LENGTH, stop_reason=None)

    def beginning(self, index: int) -> Iterator[dict[str, Any]]:
        if self.body.echo or self.body.return_token_ids:
            prompt = self.prompt_index(index)
            logprobs = self._prompt_columns(prompt) if self.body.echoes_logprobs else None
            choice = {"index": index, "text": self._echoes[prompt], "logprobs": logprobs, "finish_reason": None}
            yield self.chunk(choice | {"stop_reason": None} | self._prompt_ids(prompt))

    def chunks(self, delta: TokenDelta) -> Iterator[dict[str, Any]]:
        prompt = self.prompt_index(delta.index)
        ready = [self._shown(delta)]
        if prompt in self._held:
            self._held[prompt] += ready
            if delta.prompt_logprobs is None:
                return
            self._prompt_logprobs[prompt] = delta.prompt_logprobs
            ready = self._held.pop(prompt)
        for each in ready:
            yield from super().chunks(each)

    def choice(self, index: int, deltas: Sequence[TokenDelta]) -> dict[str, Any]:
        prompt = self.prompt_index(index)
        text = self._echoes[prompt] + "".join([delta.text for delta in deltas])
        logprobs = self._output_columns(index, deltas)
        if self.body.echoes_logprobs:
            logprobs = {name: before + logprobs[name] for name, before in self._prompt_columns(prompt).items()}
        choice = {"index": index, "text": text, "logprobs": logprobs, **_end(deltas), **self.token_ids(deltas)}
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self.logprobs.prompt(self._prompt_logprobs[prompt])
        return choice | self._prompt_ids(prompt)

    def chunk_choice(self, delta: TokenDelta) -> dict[str, Any]:
        logprobs = self._output_columns(delta.index, [delta]) if delta.logprobs is not None else None
        choice = {"index": delta.index, "text": delta.text, "logprobs": logprobs}
        return choice | _end([delta]) | self.token_ids([delta])

    def _prompt_ids(self, prompt: int) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompts[prompt].token_ids} if self.body.return_token_ids else {}

    def _prompt_columns(self, prompt: int) -> Columns:
        ids = self.prompts[prompt].token_ids
        offsets = prompt_offsets(self.tokenizer, self._echoes[prompt], ids)
        return self.logprobs.columns(ids, self._prompt_logprobs[prompt], offsets)

    def _output_columns(self, index: int, deltas: Sequence[TokenDelta]) -> Columns | None:
        if self.body.logprobs is None:
            return None
        entries = [delta.logprobs for delta in deltas if delta.logprobs is not None]
        ids = [entry.token_id for entry in entries]
        return self.logprobs.columns(ids, entries, [self._offsets[index].next(i) for i in ids])


class ChatResponses(Responses):
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    body: ChatCompletionRequest

    def __init__(self, *args: Any):
        super().__init__(*args)
        use = self.body.tool_use
        self._parsers = [] if use is None else [ToolCallParser(use) for _ in self._deltas]

    def whole(self) -> dict[str, Any]:
        response = super().whole() | self._prompt_ids()
        if self.body.prompt_logprobs is not None:
            response["prompt_logprobs"] = self.logprobs.prompt(self._prompt_logprobs[0])
        return response

    def beginning(self, index: int) -> Iterator[dict[str, Any]]:
        first = len(self._begun) == 1
        role = {"role": "assistant", "content": ""}
        chunk = self.chunk({"index": index, "delta": role, "logprobs": None, "finish_reason": None})
        yield chunk | (self._prompt_ids() if first else {})

    def choice(self, index: int, deltas: Sequence[TokenDelta]) -> dict[str, Any]:
        text, calls = self._parsed(index, deltas)
        message = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            without_places = [{name: value for name, value in call.items() if name != "index"} for call in calls]
            message |= {"content": text or None, "tool_calls": without_places}
        choice = {"index": index, "message": message, "logprobs": self._logprobs(deltas)}
        return choice | self._end_of(index, deltas) | self.token_ids(deltas)

    def chunk_choice(self, delta: TokenDelta) -> dict[str, Any]:
        text, calls = self._parsed(delta.index, [delta])
        content = {"content": text} if text or delta.finish_reason is None else {}
        if calls:
            content |= {"tool_calls": calls}
        logprobs = self._logprobs([delta]) if delta.logprobs is not None else None
        choice = {"index": delta.index, "delta": content, "logprobs": logprobs}
        return choice | self._end_of(delta.index, [delta]) | self.token_ids([delta])

    def _parsed(self, index: int, deltas: Sequence[TokenDelta]) -> tuple[str, list[dict[str, Any]]]:
        """Their text without the calls in it, and these."""
        text = "".join([delta.text for delta in deltas])
        if not self._parsers:
            return text, []
        text, calls = self._parsers[index].feed(text)
        if deltas[-1].finish_reason is None:
            return text, calls
        rest, last = self._parsers[index].end()
        return text + rest, calls + last

    def _end_of(self, index: int, deltas: Sequence[TokenDelta]) -> dict[str, Any]:
        end = _end(deltas)
        if self._parsers and self._parsers[index].num_calls and end["finish_reason"] == "stop":
            end["finish_reason"] = "tool_calls"
        return end

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompts[0].token_ids} if self.body.return_token_ids else {}

    def _logprobs(self, deltas: Sequence[TokenDelta]) -> dict[str, Any] | None:
        if self.body.num_logprobs() is None:
            return None
        entries = [delta.logprobs for delta in deltas if delta.logprobs is not None]
        return {"content": [self.logprobs.chat_entry(entry) for entry in entries]}
