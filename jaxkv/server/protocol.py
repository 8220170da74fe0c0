"""The requests of the OpenAI API as clients send them: every field may be null, unknown ones are ignored.

Responses are plain dicts (see responses.py): encoding a pydantic model costs 4 us a chunk, a dict 0.14 us.
"""

import abc
import logging
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from jaxkv.core.errors import RequestError
from jaxkv.core.request import SamplingParams

logger = logging.getLogger(__name__)

# Most sequences of one HTTP request: prompts times n.
MAX_SEQUENCES = 1024
MAX_SEED = 2**63 - 1
# What "off" looks like for fields that are known and cannot be honoured yet; anything else is refused by name.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "logits_processors": ([],),
    "min_output_tokens": (0,),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
# Known and without effect here, so not worth a log line.
_HARMLESS = frozenset({"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier",
                       "spaces_between_special_tokens", "prompt_cache_key", "request_id", "tools"})  # fmt: skip
_reported: set[str] = set()


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None


class GenerationRequest(BaseModel, abc.ABC):
    """What completions and chat completions share."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None

    default_max_tokens: ClassVar[int | None] = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @abc.abstractmethod
    def num_logprobs(self) -> int | None:
        """Alternatives asked for with each token; None for no log-probabilities."""

    def requested_max_tokens(self) -> int | None:
        return self.max_tokens

    def check(self) -> None:
        """Raises RequestError for what is known and not supported; logs what is unknown, once a field."""
        for name, value in (self.model_extra or {}).items():
            if name in _NEUTRAL:
                if value is not None and value not in _NEUTRAL[name]:
                    raise RequestError(f"{name} is not supported by this server: leave it out", param=name)
            elif name not in _HARMLESS and name not in _reported and len(_reported) < 1000:
                _reported.add(name)
                logger.warning("ignored the unknown request field %.100r", name)
        if not 1 <= self.num_choices <= MAX_SEQUENCES:
            raise RequestError(f"n is {self.n}; it must be 1 to {MAX_SEQUENCES}", param="n")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true", param="stream_options")
        if self.seed is not None and not -MAX_SEED - 1 <= self.seed <= MAX_SEED:
            raise RequestError(f"seed is {self.seed}; it must fit 64 bits", param="seed")
        if self.priority is not None and not -MAX_SEED - 1 <= self.priority <= MAX_SEED:
            raise RequestError(f"priority is {self.priority}; it must fit 64 bits", param="priority")
        if self.cache_salt is not None and not 1 <= len(self.cache_salt) <= 1024:
            raise RequestError(
                f"cache_salt has {len(self.cache_salt)} characters; 1 to 1024 are allowed", param="cache_salt"
            )
        _check_text(self.cache_salt, "cache_salt")
        for text in self._stops():
            _check_text(text, "stop")

    def _stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling_params(self) -> SamplingParams:
        """The request's parameters, not yet checked for their ranges."""

        def given(value: Any, default: Any) -> Any:
            return default if value is None else value

        max_tokens = self.requested_max_tokens()
        return SamplingParams(
            n=self.num_choices,
            max_tokens=self.default_max_tokens if max_tokens is None else max_tokens,
            temperature=given(self.temperature, 1.0),
            top_p=given(self.top_p, 1.0),
            top_k=given(self.top_k, 0),
            min_p=given(self.min_p, 0.0),
            repetition_penalty=given(self.repetition_penalty, 1.0),
            presence_penalty=given(self.presence_penalty, 0.0),
            frequency_penalty=given(self.frequency_penalty, 0.0),
            logit_bias=tuple((_token_id(key), bias) for key, bias in (self.logit_bias or {}).items()),
            seed=self.seed,
            stop=self._stops(),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            ignore_eos=bool(self.ignore_eos),
            min_tokens=given(self.min_tokens, 0),
            logprobs=self.num_logprobs(),
            skip_special_tokens=given(self.skip_special_tokens, True),
        )


class CompletionRequest(GenerationRequest):
    prompt: str | list[str] | list[int] | list[list[int]] | None = None
    logprobs: int | None = None
    echo: bool | None = None

    default_max_tokens: ClassVar[int | None] = 16

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        super().check()
        if self.model_extra and self.model_extra.get("tools"):
            raise RequestError("tools belong to chat completions", param="tools")
        if self.echo and self.logprobs is not None:
            raise RequestError("echo together with logprobs is not supported by this server yet", param="echo")

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or token ids."""
        if self.prompt is None:
            raise RequestError("prompt is missing", param="prompt")
        if isinstance(self.prompt, str):
            prompts = [self.prompt]
        elif self.prompt and isinstance(self.prompt[0], int):
            prompts = [self.prompt]
        else:
            prompts = self.prompt
        if not 1 <= len(prompts) * self.num_choices <= MAX_SEQUENCES:
            raise RequestError(
                f"{len(prompts)} prompts times n = {self.num_choices} is {len(prompts) * self.num_choices} sequences; "
                f"1 to {MAX_SEQUENCES} are allowed in one request",
                param="prompt",
            )
        for prompt in prompts:
            if isinstance(prompt, str):
                _check_text(prompt, "prompt")
        return prompts


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None

    def plain(self) -> dict[str, Any]:
        """For the chat template: content as one text."""
        return {**(self.model_extra or {}), "role": self.role, "content": self._text()}

    def _text(self) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        texts = []
        for part in self.content:
            text = part.get("text")
            if part.get("type", "text") != "text" or not isinstance(text, str):
                raise RequestError(
                    f"a content part of type {part.get('type')!r} is not supported: only text parts with a text are",
                    param="messages",
                )
            texts.append(text)
        return "\n".join(texts)


class ChatCompletionRequest(GenerationRequest):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def requested_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.tools and self.tool_choice != "none":
            raise RequestError('tools are not supported by this server yet: set tool_choice to "none"', param="tools")
        if self.tool_choice not in (None, "none", "auto"):
            raise RequestError('tool_choice is not supported by this server yet: set it to "none"', param="tool_choice")
        if self.top_logprobs is not None and self.top_logprobs != 0 and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        reserved = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
        if clash := sorted(reserved & (self.chat_template_kwargs or {}).keys()):
            raise RequestError(f"chat_template_kwargs cannot set {', '.join(clash)}", param="chat_template_kwargs")

    def template_arguments(self) -> dict[str, Any]:
        """Keywords for Tokenizer.apply_chat_template."""
        continues = bool(self.continue_final_message)
        generates = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        return {
            **(self.chat_template_kwargs or {}),
            "add_generation_prompt": generates,
            "continue_final_message": continues,
        }


class TokenizeRequest(BaseModel):
    """/tokenize: a prompt, or messages."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    tokens: list[int]


def _token_id(key: str) -> int:
    """A key of logit_bias: JSON objects have no other than strings."""
    if not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise RequestError(f"logit_bias has the key {key[:50]!r}, which is not a token id", param="logit_bias")
    return int(key)


def _check_text(text: str | None, param: str) -> None:
    """JSON can escape half of a surrogate pair, which is no text and cannot be encoded."""
    if text is not None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"{param} is not valid Unicode text: {error.reason}", param=param) from error
