"""The requests of the OpenAI API as clients send them: every field may be null, unknown ones are ignored.

Responses are plain dicts (see responses.py): encoding a pydantic model costs 4 us a chunk, a dict 0.14 us.
"""

import abc
import logging
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr
from pydantic_core import PydanticCustomError

from jaxkv.control.validation import MAX_SEQUENCES
from jaxkv.core.errors import RequestError
from jaxkv.core.request import MAX_LOGIT_BIASES, SamplingParams, StructuredOutputs
from jaxkv.server.messages import FIRST_MISTAKE, ChatMessage, Objects
from jaxkv.server.tools import ToolFormat, ToolUse, checked_tools

logger = logging.getLogger(__name__)

MAX_SEED = 2**63 - 1
# What "off" looks like for fields that are known and cannot be honoured yet; anything else is refused by name.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "min_output_tokens": (0,),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "stream_interval": (1,),
    "suffix": ("",),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
# Known and without effect here, so not worth a log line.
_HARMLESS = frozenset({"metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier",
                       "spaces_between_special_tokens", "prompt_cache_key", "session_id", "tools"})  # fmt: skip
_reported: set[str] = set()


def _refuse_many(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIASES:
        raise PydanticCustomError(
            "too_many", "{count} entries; at most {most} are allowed", {"count": len(value), "most": MAX_LOGIT_BIASES}
        )
    return value


Strings = Annotated[list[str], FIRST_MISTAKE]
TokenIds = Annotated[list[int], FIRST_MISTAKE]
LogitBias = Annotated[dict[str, float], BeforeValidator(_refuse_many)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputsBody(BaseModel):
    """vLLM's field of that name."""

    model_config = ConfigDict(strict=True, extra="allow")

    json_schema: str | dict[str, Any] | bool | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = None

    def wanted(self) -> StructuredOutputs:
        for name, value in (self.model_extra or {}).items():
            if value is not None and value is not False and name != "whitespace_pattern":
                raise RequestError(f"structured_outputs.{name} is not supported", param="structured_outputs")
        return StructuredOutputs(
            json=self.json_schema,
            json_object=self.json_object,
            regex=self.regex,
            choice=None if self.choice is None else tuple(self.choice),
            grammar=self.grammar,
        )


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")


class ResponseFormat(BaseModel):
    """OpenAI's: text, json_object, or json_schema."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: str
    json_schema: JsonSchemaFormat | None = None

    def wanted(self) -> StructuredOutputs | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return StructuredOutputs(json_object=True)
        if self.type != "json_schema":
            raise RequestError(
                f"response_format has the type {self.type!r}; choose text, json_object or json_schema",
                param="response_format",
            )
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise RequestError("response_format of type json_schema needs json_schema.schema", param="response_format")
        return StructuredOutputs(json=self.json_schema.schema_)


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
    logit_bias: LogitBias | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Strings | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    user: str | None = None

    default_max_tokens: ClassVar[int | None] = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream's last chunk tells the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream tells the usage so far."""
        return self.include_usage and bool(self.stream_options.continuous_usage_stats)

    @property
    def skips_special_tokens(self) -> bool:
        return self.skip_special_tokens is not False

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @abc.abstractmethod
    def num_logprobs(self) -> int | None:
        """Alternatives asked for with each token; None for no log-probabilities."""

    def num_prompt_logprobs(self) -> int | None:
        """Alternatives asked for with each token of the prompt; None for no log-probabilities."""
        return self.prompt_logprobs

    def requested_max_tokens(self) -> int | None:
        return self.max_tokens

    def names(self) -> Mapping[str, str]:
        """What this request calls fields of SamplingParams, where it has another name for them."""
        if self.response_format is None:
            return {}
        return {
            "structured_outputs.json": "response_format.json_schema.schema", "structured_outputs": "response_format"
        }  # fmt: skip

    def in_its_words(self, error: RequestError) -> RequestError:
        """An error that names fields of SamplingParams, told with the names that the client knows."""
        message = str(error)
        for name, shown in self.names().items():
            message = re.sub(rf"\b{re.escape(name)}\b", shown, message)
        return RequestError(message, param=self.names().get(error.param, error.param), status=error.status)

    def check(self, tools: ToolFormat | None = None) -> None:
        """Raises RequestError for what is known and not supported; logs what is unknown, once a field.

        Args:
          tools: how the model writes calls of tools, if it does.
        """
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
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs cannot be streamed: set stream to false", param="prompt_logprobs")
        if self.prompt_logprobs is not None and self.prompt_logprobs < 0:
            raise RequestError(
                f"prompt_logprobs is {self.prompt_logprobs}; it must be at least 0", param="prompt_logprobs"
            )
        if self.truncate_prompt_tokens is not None and not (
            self.truncate_prompt_tokens == -1 or self.truncate_prompt_tokens >= 1
        ):
            raise RequestError(
                f"truncate_prompt_tokens is {self.truncate_prompt_tokens}; it must be at least 1, "
                "or -1 to keep as many as fit",
                param="truncate_prompt_tokens",
            )
        if self.seed is not None and not -MAX_SEED - 1 <= self.seed <= MAX_SEED:
            raise RequestError(f"seed is {self.seed}; it must fit 64 bits", param="seed")
        if self.priority is not None and not -MAX_SEED - 1 <= self.priority <= MAX_SEED:
            raise RequestError(f"priority is {self.priority}; it must fit 64 bits", param="priority")
        for name, text in (("cache_salt", self.cache_salt), ("request_id", self.request_id)):
            _check_name(text, name)
        for text in self._stops():
            _check_text(text, "stop")
        for text in self.bad_words or ():
            _check_text(text, "bad_words")

    def _stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def _structured_outputs(self) -> StructuredOutputs | None:
        formats = [asked.wanted() for asked in (self.response_format, self.structured_outputs) if asked is not None]
        formats = [asked for asked in formats if asked is not None]
        if len(formats) > 1:
            raise RequestError(
                "response_format and structured_outputs both say what the output must be: leave one out",
                param="structured_outputs",
            )
        return formats[0] if formats else None

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
            prompt_logprobs=self.num_prompt_logprobs(),
            skip_special_tokens=self.skips_special_tokens,
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_words=tuple(self.bad_words or ()),
            structured_outputs=self._structured_outputs(),
        )


class CompletionRequest(GenerationRequest):
    prompt: str | Strings | TokenIds | Annotated[list[TokenIds], FIRST_MISTAKE]
    logprobs: int | None = None
    echo: bool | None = None

    default_max_tokens: ClassVar[int | None] = 16

    @property
    def echoes_only(self) -> bool:
        """The prompt is all that is wanted; the engine's least, one token, is not shown."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def echoes_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in asked if count is not None), default=None)

    def requested_max_tokens(self) -> int | None:
        return 1 if self.echoes_only else self.max_tokens

    def check(self, tools: ToolFormat | None = None) -> None:
        super().check(tools)
        if self.model_extra and self.model_extra.get("tools"):
            raise RequestError("tools belong to chat completions", param="tools")
        if self.echoes_only and self.min_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, more than max_tokens = 0", param="min_tokens")

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or token ids."""
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


class ChatCompletionRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], FIRST_MISTAKE]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    _tool_use: ToolUse | None = PrivateAttr(None)

    @property
    def tool_use(self) -> ToolUse | None:
        """What may be called, once `check` has been made."""
        return self._tool_use

    @property
    def skips_special_tokens(self) -> bool:
        shows = self._tool_use is not None and bool(self._tool_use.format.control_ids)
        return super().skips_special_tokens and not shows

    def _structured_outputs(self) -> StructuredOutputs | None:
        wanted = super()._structured_outputs()
        calls = None if self._tool_use is None else self._tool_use.grammar()
        if calls is not None and wanted is not None:
            raise RequestError(
                "tool_choice forces a call, and response_format or structured_outputs something else: leave one out",
                param="tool_choice",
            )
        return wanted if calls is None else StructuredOutputs(grammar=calls)

    def requested_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def names(self) -> Mapping[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {**super().names(), "logprobs": "top_logprobs", "max_tokens": limit}

    def in_its_words(self, error: RequestError) -> RequestError:
        if error.param == "structured_outputs" and self._tool_use is not None and self._tool_use.forced:
            error = self._tool_use.in_its_words(error)
        return super().in_its_words(error)

    def check(self, tools: ToolFormat | None = None) -> None:
        super().check(tools)
        self._tool_use = checked_tools(self.tools, self.tool_choice, self.parallel_tool_calls is not False, tools)
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
            **({} if self._tool_use is None else {"tools": list(self._tool_use.tools)}),
            "add_generation_prompt": generates,
            "continue_final_message": continues,
        }


class TokenizeRequest(BaseModel):
    """/tokenize: a prompt, or messages."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], FIRST_MISTAKE] | None = None
    tools: Objects | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DiagnosePrefixRequest(TokenizeRequest):
    """/diagnose_prefix: the same or token ids, and the salt under which it would come."""

    prompt: str | TokenIds | None = None
    cache_salt: str | None = None

    def check(self) -> None:
        _check_name(self.cache_salt, "cache_salt")


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    tokens: TokenIds


def _token_id(key: str) -> int:
    """A key of logit_bias: JSON objects have no other than strings."""
    if not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise RequestError(f"logit_bias has the key {key[:50]!r}, which is not a token id", param="logit_bias")
    return int(key)


def _check_name(text: str | None, param: str) -> None:
    if text is not None and not 1 <= len(text) <= 1024:
        raise RequestError(f"{param} has {len(text)} characters; 1 to 1024 are allowed", param=param)
    _check_text(text, param)


def _check_text(text: str | None, param: str) -> None:
    """JSON can escape half of a surrogate pair, which is no text and cannot be encoded."""
    if text is not None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"{param} is not valid Unicode text: {error.reason}", param=param) from error
