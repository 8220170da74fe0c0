"""The main job, as a user does it: `scripts/serve.py` on the demo model, asked through the official openai client."""

import concurrent.futures
import re

import httpx
import openai
import pytest

from tests.support.demo_server import demo_server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server():
    """(base URL, everything printed until it was ready)."""
    with demo_server() as running:
        yield running


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=server[0] + "/v1", api_key="none", max_retries=0)


def test_start_tells_the_memory(server):
    said = server[1]
    assert re.search(r"KV cache size: ([\d,]+) tokens", said)
    assert re.search(r"Maximum concurrency for 512 tokens a request: \d+\.\d\dx", said)
    assert "46,080 bytes a token" in said  # 2 x 30 layers x 3 KV heads x 64 x 4 bytes


def test_chat_answers(client):
    reply = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, max_tokens=32)
    assert reply.choices[0].message.content == "The capital of France is Paris."
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens == 8  # the end-of-sequence token counts


def test_streamed_equals_unstreamed(client):
    asked = {"model": "demo", "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]


def test_second_time_the_prompt_is_cached(client):
    asked = {"model": "demo", "prompt": "Count with me: one two three four " * 8, "temperature": 0, "max_tokens": 4}
    first = client.completions.create(**asked)
    second = client.completions.create(**asked)
    assert first.choices[0].text == second.choices[0].text
    cached, prompt = second.usage.prompt_tokens_details.cached_tokens, second.usage.prompt_tokens
    # Of the last block, which the answer may not have filled, nothing can be found.
    assert cached == min(prompt - 1, (prompt + 3) // 16 * 16) > 0


def test_more_requests_than_rows(client):
    def ask(i: int) -> str:
        reply = client.completions.create(model="demo", prompt=f"{i} plus {i} is", temperature=0, max_tokens=5 + i)
        assert reply.usage.completion_tokens <= 5 + i
        return reply.choices[0].text

    alone = [ask(i) for i in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        together = list(pool.map(ask, range(6)))
    assert together == alone


def test_mistakes_are_told_and_harm_nobody(client, server):
    with pytest.raises(openai.BadRequestError, match="512"):
        client.completions.create(model="demo", prompt=[5] * 600, max_tokens=1)
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt="x")
    assert httpx.post(server[0] + "/v1/completions", content=b"{").status_code == 400
    assert httpx.get(server[0] + "/health").status_code == 200
    assert client.completions.create(model="demo", prompt="Hello", max_tokens=2).usage.completion_tokens == 2
