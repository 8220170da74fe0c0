"""Known prompts sent to a server, so that their prefixes are in its cache when the first users come."""

import bisect
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import aiohttp

from benchlib.serving_client import Outcome, ask
from jaxkv.control.prefix_index import num_common, token_bytes
from jaxkv.core.errors import ConfigError
from jaxkv.core.request_record import RequestRecord

QUESTION = "Can you help me with a question about this?"


@dataclasses.dataclass(frozen=True)
class KnownPrompt:
    """What is to be in the cache: a text or token ids for /v1/completions, or messages for /v1/chat/completions.

    Attributes:
      name: for tables; of a log's prefix with the number of its requests.
      cache_salt: only requests with the same one will find it.
    """

    name: str
    content: str | tuple[int, ...] | tuple[dict[str, Any], ...]
    cache_salt: str | None = None

    @property
    def is_chat(self) -> bool:
        return isinstance(self.content, tuple) and bool(self.content) and isinstance(self.content[0], dict)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, model: str, *, asks: bool = False) -> dict[str, Any]:
        """A request of one token; `asks`: with a question behind, as a first user would send it."""
        content: Any = self.content
        if self.is_chat:
            content = [*content, {"role": "user", "content": QUESTION}] if asks else list(content)
        elif isinstance(content, str):
            content = f"{content}\n{QUESTION}" if asks else content
        else:
            content = [*content, *reversed(content[-16:])] if asks else list(content)
        salt = {} if self.cache_salt is None else {"cache_salt": self.cache_salt}
        return {
            "model": model,
            "max_tokens": 1,
            "temperature": 0,
            "messages" if self.is_chat else "prompt": content,
        } | salt


def read_prompts(path: pathlib.Path) -> list[KnownPrompt]:
    """JSON lines with `messages`, or with `prompt` (a text or token ids), and perhaps `cache_salt`; of any other file the
    whole text is one prompt.

    Raises ConfigError naming file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts is {str(path)!r}, which cannot be read as UTF-8 text: {error}") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"prompts is {str(path)!r}, which is empty")
    if not lines[0][1].lstrip().startswith("{"):
        return [KnownPrompt(path.name, text)]
    found = []
    for number, line in lines:
        try:
            row = json.loads(line)
            given = [row[name] for name in ("messages", "prompt") if name in row]
        except (ValueError, TypeError):
            given = []
        if len(given) != 1 or not isinstance(given[0], str | list) or not given[0]:
            raise ConfigError(f"{path.name}, line {number}: expected a JSON object with either messages or prompt")
        content = given[0] if isinstance(given[0], str) else tuple(given[0])
        found.append(KnownPrompt(f"{path.name}:{number}", content, row.get("cache_salt")))
    return found


def top_prefixes(
    records: Sequence[RequestRecord], *, most: int, min_requests: int, min_tokens: int
) -> tuple[list[KnownPrompt], int]:
    """The longest prefixes that at least `min_requests` prompts of a log begin with, those first that save most tokens.

    No prefix of a longer one is among them. Of salted requests the log tells no salt, so they cannot be warmed.

    Returns:
      The prefixes, and how many requests were left out for their salt.

    Raises ConfigError: the log has no token ids.
    """
    if records and all(record.prompt_token_ids is None for record in records):
        raise ConfigError("log has no token ids: serve with --request_log_tokens, or give prompts")
    unsalted = [record for record in records if record.salt is None and record.prompt_token_ids is not None]
    # Sorted, so that what n neighbours share is what the first and the last of them do.
    prompts = sorted(record.prompt_token_ids for record in unsalted)
    packed = [token_bytes(prompt) for prompt in prompts]
    shared = {
        prompts[i][:length]
        for i in range(len(prompts) - min_requests + 1)
        if (length := num_common(packed[i], packed[i + min_requests - 1])) >= min_tokens
    }
    ordered = sorted(shared)
    longest = [one for one, after in zip(ordered, [*ordered[1:], ()]) if after[: len(one)] != one]
    counted = [(_count(prompts, prefix), prefix) for prefix in longest]
    counted.sort(key=lambda item: -item[0] * len(item[1]))
    named = [KnownPrompt(f"prefix of {count} requests", prefix) for count, prefix in counted[:most]]
    return named, len(records) - len(unsalted)


def _count(prompts: Sequence[tuple[int, ...]], prefix: tuple[int, ...]) -> int:
    """How many of the sorted prompts begin with it."""
    begin = bisect.bisect_left(prompts, prefix)
    end = bisect.bisect_left(prompts, (*prefix[:-1], prefix[-1] + 1), lo=begin)
    return end - begin


@dataclasses.dataclass(frozen=True)
class Warmed:
    """What became of one prompt.

    Attributes:
      tokens: of the prompt. cached_before / cached_after: of them, when it was sent, and when all had been sent.
      seconds: that it took. error: empty if it succeeded.
    """

    prompt: KnownPrompt
    tokens: int = 0
    cached_before: int = 0
    cached_after: int = 0
    seconds: float = 0.0
    error: str = ""


async def warm(
    session: aiohttp.ClientSession, base_url: str, model: str, prompts: Sequence[KnownPrompt]
) -> list[Warmed]:
    """Send all, one after the other, and then all again, to see what is found."""
    first = [await _send(session, base_url, model, prompt) for prompt in prompts]
    again = [await _send(session, base_url, model, prompt) for prompt in prompts]
    return [
        Warmed(prompt, one.prompt_len, one.cached_tokens, two.cached_tokens, one.latency, one.error or two.error)
        for prompt, one, two in zip(prompts, first, again, strict=True)
    ]


async def first_requests(
    session: aiohttp.ClientSession, base_url: str, model: str, prompts: Sequence[KnownPrompt]
) -> list[Outcome]:
    """One user for each prompt, one after the other."""
    return [await _send(session, base_url, model, prompt, asks=True) for prompt in prompts]


async def empty_cache(session: aiohttp.ClientSession, base_url: str) -> None:
    """Raises ConfigError where a server cannot do that, or does not since it is busy."""
    async with session.post(f"{base_url}/reset_prefix_cache") as response:
        if response.status != 200:
            raise ConfigError(
                f"measure needs POST {base_url}/reset_prefix_cache, which answers HTTP {response.status}: restart the "
                "server instead, and compare the first requests with and without a run of this program"
            )
        text = await response.text()
    if text and json.loads(text).get("success") is False:
        raise ConfigError(f"the cache of {base_url} is not emptied while requests run: measure when nobody uses it")


async def _send(
    session: aiohttp.ClientSession, base_url: str, model: str, prompt: KnownPrompt, *, asks: bool = False
) -> Outcome:
    return await ask(session, base_url + prompt.path, prompt.body(model, asks=asks))
