"""A client of any OpenAI endpoint that notes when each token came: streams, one request at a time."""

import dataclasses
import time
from typing import Any

import aiohttp
import orjson

from jaxkv.core.errors import ConfigError


@dataclasses.dataclass
class Outcome:
    """What became of one request. Times in seconds; `start` on time.perf_counter.

    Attributes:
      error: empty when it succeeded.
      queue_time: how long it waited for its turn under max_concurrency, before `start`.
      ttft: from start to the first event with a choice. itl: between such events. latency: from start to the last.
      prompt_len, output_tokens, cached_tokens: what the server says in `usage`; without it, the events counted.
    """

    start: float
    queue_time: float = 0.0
    error: str = ""
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = dataclasses.field(default_factory=list)
    prompt_len: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""


async def first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """The first of the server's model ids. Raises ConfigError."""
    try:
        async with session.get(f"{base_url}/v1/models") as response:
            if response.status in (401, 403):
                raise ConfigError(f"the server at {base_url} wants another API key: set OPENAI_API_KEY to one of its own")
            return (await response.json())["data"][0]["id"]
    except (aiohttp.ClientError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"base_url is {base_url}, and GET /v1/models there gives no model ({type(error).__name__}: {error}); "
            "start the server, or give served_model_name if it has no such list"
        ) from error


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], *, queue_time: float = 0.0) -> Outcome:
    """Sends a request with `stream` on and reads it to its end. Never raises what a server or network can cause."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    outcome = Outcome(time.perf_counter(), queue_time)
    try:
        async with session.post(url, data=orjson.dumps(body), headers={"content-type": "application/json"}) as response:
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return outcome
            await _read(response, outcome)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
        return outcome
    if not outcome.error and not outcome.latency:
        outcome.error = "the stream ended without a token"
    return outcome


async def _read(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    pieces, last, rest = [], 0.0, b""
    async for data in response.content.iter_any():
        now = time.perf_counter()
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if not event.startswith(b"data: {"):
                continue  # a comment, or [DONE]
            chunk = orjson.loads(event[6:])
            if "error" in chunk:
                outcome.error = f"in the stream: {chunk['error'].get('message')}"
            elif choices := chunk.get("choices"):
                delta = choices[0].get("delta")
                text = choices[0].get("text") if delta is None else delta.get("content")
                if delta is not None and delta.get("role") and not text:
                    continue  # an announcement, before any token
                if last:
                    outcome.itl.append(now - last)
                else:
                    outcome.ttft = now - outcome.start
                last = now
                pieces.append(text or "")
                outcome.output_tokens += 1
            elif usage := chunk.get("usage"):
                outcome.prompt_len = usage["prompt_tokens"]
                outcome.output_tokens = usage["completion_tokens"]
                outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    outcome.text = "".join(pieces)
    outcome.latency = last - outcome.start if last else 0.0
