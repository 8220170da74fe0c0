"""What the handlers share: the engine, the model's limits, and the way from an API request to engine requests."""

import asyncio
import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.async_engine import AsyncEngine, RequestStream
from jaxkv.constraints.compiler import ConstraintCompiler
from jaxkv.control.validation import check_token_ids, checked_sampling
from jaxkv.core.errors import RequestError
from jaxkv.core.metrics import MissReason
from jaxkv.core.request import Request, SamplingParams
from jaxkv.insight.traffic import Traffic
from jaxkv.server.history import History
from jaxkv.server.messages import ChatMessage
from jaxkv.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from jaxkv.server.tools import ToolFormat, tool_format
from jaxkv.tokenization.tokenizer import Tokenizer

# Text this short is tokenised in under 0.2 ms: cheaper than a trip to another thread, and too short to be felt.
_INLINE_CHARACTERS = 1000


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt ready for the engine.

    Attributes:
      text: as the client gave it or the template rendered it; None for token ids.
    """

    text: str | None
    token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Serving:
    """One model behind the API.

    Attributes:
      model_names: ids that requests may name; the first is the one in responses.
      vocab_size: ids the model takes. max_model_len: most tokens of prompt and output together.
      constraints: makes requests keep to a grammar, a schema or lists of tokens.
      cache_config: settings of the KV cache, for /metrics.
      traffic: the latest requests, for /metrics and /dashboard. history: of pool and queue, for the latter.
      created: Unix time in seconds for the model card.
    """

    engine: AsyncEngine
    tokenizer: Tokenizer
    model_names: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    max_logprobs: int
    constraints: ConstraintCompiler
    cache_config: Mapping[str, str] = dataclasses.field(default_factory=dict)
    traffic: Traffic = dataclasses.field(default_factory=Traffic)
    history: History = dataclasses.field(default_factory=History)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @functools.cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes calls of tools, if its chat template takes any."""
        return tool_format(self.tokenizer)

    def check_model(self, name: str | None) -> None:
        """No name is fine; a wrong one is a RequestError with status 404."""
        if name is not None and name not in self.model_names:
            raise RequestError(f"The model `{name}` does not exist.", param="model", status=404)

    def check_length(self, text: str) -> None:
        """Refuse, before the work of tokenising it, a text that cannot fit however well it is tokenised."""
        longest = self.max_model_len * self.tokenizer.longest_token
        if len(text) > longest:
            raise RequestError(
                f"This model's maximum context length is {self.max_model_len} tokens, at most {longest} characters. "
                f"However, your prompt has {len(text)} characters. Please reduce the length of the input prompt.",
                param="input_tokens",
            )

    async def encode(self, text: str, add_special_tokens: bool) -> Prompt:
        self.check_length(text)
        if len(text) <= _INLINE_CHARACTERS:
            return Prompt(text, tuple(self.tokenizer.encode(text, add_special_tokens)))
        ids = await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)
        return Prompt(text, tuple(ids))

    def tokenizer_info(self) -> dict[str, Any]:
        """Under the names of tokenizer_config.json; nothing of where the files lie."""
        tokenizer = self.tokenizer
        special = {
            name: tokenizer.special_tokens.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        }
        return special | {
            "add_bos_token": tokenizer.adds_bos,
            "chat_template": tokenizer.chat_template,
            "model_max_length": self.max_model_len,
        }

    async def completion_prompts(self, body: CompletionRequest) -> list[Prompt]:
        add_special_tokens = body.add_special_tokens is not False
        prompts = []
        for prompt in body.prompts():
            if isinstance(prompt, str):
                prompts.append(await self.encode(prompt, add_special_tokens))
            else:
                check_token_ids(prompt, self.vocab_size)  # before an echo of them is decoded
                prompts.append(Prompt(None, tuple(prompt)))
        return prompts

    async def chat_prompt(
        self, messages: Sequence[ChatMessage], arguments: dict, add_special_tokens: bool = False
    ) -> Prompt:
        """Renders and encodes off the event loop: how long a template takes is its own affair."""

        def run() -> Prompt:
            plain = [message.plain(f"messages[{i}]") for i, message in enumerate(messages)]
            text = self.tokenizer.apply_chat_template(plain, **arguments)
            self.check_length(text)
            return Prompt(text, tuple(self.tokenizer.encode(text, add_special_tokens)))

        return await asyncio.to_thread(run)

    async def prompts(self, body: GenerationRequest) -> list[Prompt]:
        return [self._truncated(prompt, body) for prompt in await self._all_of_prompts(body)]

    def _truncated(self, prompt: Prompt, body: GenerationRequest) -> Prompt:
        """Its last tokens, where the request keeps only so many."""
        keep = body.truncate_prompt_tokens
        if keep == -1:
            keep = max(1, self.max_model_len - max(1, body.sampling_params().max_tokens or 1))
        return prompt if keep is None or len(prompt.token_ids) <= keep else Prompt(None, prompt.token_ids[-keep:])

    async def _all_of_prompts(self, body: GenerationRequest) -> list[Prompt]:
        if isinstance(body, ChatCompletionRequest):
            return [await self.chat_prompt(body.messages, body.template_arguments(), bool(body.add_special_tokens))]
        assert isinstance(body, CompletionRequest)
        return await self.completion_prompts(body)

    async def explain_prefix(self, prompt: Prompt, cache_salt: str | None) -> dict[str, Any]:
        """What the prefix cache has of a prompt now, and why not more. That others have it under their salts is not told:
        salts exist to hide that."""
        sampling = SamplingParams(max_tokens=1)
        found = await self.engine.explain_prefix(Request("", prompt.token_ids, sampling, cache_salt=cache_salt))
        missed = {reason.value: 0 for reason in MissReason if reason is not MissReason.SALT}
        for reason, tokens in found.missed.items():
            missed[(MissReason.FIRST_SEEN if reason is MissReason.SALT else reason).value] += tokens
        return {
            "prompt_tokens": found.num_tokens,
            "cached_tokens": found.num_cached,
            "parts_at": found.parts_at,
            "missed": {name: tokens for name, tokens in missed.items() if tokens},
        }

    async def submit(
        self, body: GenerationRequest, prompts: Sequence[Prompt], name: str, caller: str | None = None
    ) -> RequestStream:
        """Starts n sequences a prompt; sequence `prompt * n + i` has that index in the stream.

        Args:
          name: unlike any other request's: clients may use an id as often as they like.

        Raises:
          RequestError: one of them cannot be served; then none is.
        """
        params = body.sampling_params()
        requests = []
        constraint = None  # one for all of them, who take copies of it
        for prompt in prompts:
            try:
                sampling = checked_sampling(
                    params,
                    prompt.token_ids,
                    vocab_size=self.vocab_size,
                    max_model_len=self.max_model_len,
                    max_logprobs=self.max_logprobs,
                )
                if constraint is None:
                    constraint = await self.constraints.compile_async(sampling)
            except RequestError as error:
                raise body.in_its_words(error) from error
            requests.append(
                Request(
                    request_id=f"{name}-{len(requests)}",
                    prompt_token_ids=prompt.token_ids,
                    sampling=sampling,
                    priority=body.priority or 0,
                    cache_salt=body.cache_salt,
                    constraint=constraint,
                    caller=caller,
                )
            )
        return await self.engine.submit(requests)
