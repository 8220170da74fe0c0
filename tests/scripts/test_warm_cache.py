"""scripts/warm_cache.py: which prompts it sends, what it tells, and that the first users gain."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from benchlib import cache_warming
from benchlib.cache_warming import KnownPrompt, read_prompts, top_prefixes

from jaxkv.core.errors import ConfigError
from jaxkv.core.request_record import RequestRecord

ROOT = pathlib.Path(__file__).parents[2]
SYSTEM = tuple(range(1000, 1050))
DOCUMENT = tuple(range(3000, 3100))


def record(i, prompt, salt=None):
    sizes = {"prompt_tokens": len(prompt), "cached_tokens": 0, "computed_tokens": len(prompt), "output_tokens": 1}
    return RequestRecord(str(i), float(i), "length", prompt_token_ids=tuple(prompt), salt=salt, **sizes)


def warm(*arguments):
    command = [sys.executable, str(ROOT / "scripts" / "warm_cache.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, env=environment)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.stdout else None, done.stderr


def test_the_most_shared_prefixes_of_a_log():
    log = [record(i, SYSTEM + (i, i + 1)) for i in range(9)]  # the system prompt alone
    log += [record(10 + i, SYSTEM + DOCUMENT + (i,)) for i in range(4)]  # with a document behind it
    log += [record(20, range(5000, 5400)), record(21, SYSTEM + (7,), salt="secret")]
    found, left_out = top_prefixes(log, most=5, min_requests=3, min_tokens=10)
    assert left_out == 1
    # The document's prefix holds the system prompt, which therefore is not sent for itself.
    assert [(one.name, one.content) for one in found] == [("prefix of 4 requests", SYSTEM + DOCUMENT)]
    found, _ = top_prefixes(log, most=5, min_requests=5, min_tokens=10)
    assert [(one.name, one.content) for one in found] == [("prefix of 13 requests", SYSTEM)]
    assert top_prefixes(log, most=5, min_requests=14, min_tokens=10)[0] == []
    assert top_prefixes(log, most=5, min_requests=3, min_tokens=151)[0] == []


def test_prefixes_that_save_more_come_first():
    log = [record(i, SYSTEM + (i,)) for i in range(3)] + [record(i, DOCUMENT + (i,)) for i in range(2)]
    found, _ = top_prefixes(log, most=5, min_requests=2, min_tokens=10)
    assert [one.content for one in found] == [DOCUMENT, SYSTEM]  # 200 and 150 tokens
    assert [one.content for one in top_prefixes(log, most=1, min_requests=2, min_tokens=10)[0]] == [DOCUMENT]


def test_a_log_without_token_ids_is_refused():
    plain = RequestRecord("a", 0.0, "length", 5, 0, 5, 1)
    with pytest.raises(ConfigError, match="request_log_tokens"):
        top_prefixes([plain], most=1, min_requests=2, min_tokens=1)


def test_files_of_prompts(tmp_path):
    lines = [
        {"messages": [{"role": "system", "content": "Be brief."}]},
        {"prompt": "Hi", "cache_salt": "s"},
        {"prompt": [1, 2]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    chat, text, ids = read_prompts(tmp_path / "a.jsonl")
    assert chat.path == "/v1/chat/completions" and chat.body("m")["messages"] == lines[0]["messages"]
    assert chat.body("m", asks=True)["messages"][1]["role"] == "user"
    assert text.body("m") == {"model": "m", "max_tokens": 1, "temperature": 0, "prompt": "Hi", "cache_salt": "s"}
    assert text.body("m", asks=True)["prompt"].startswith("Hi\n")
    assert ids.path == "/v1/completions" and ids.body("m")["prompt"] == [1, 2]
    assert ids.body("m", asks=True)["prompt"] == [1, 2, 2, 1]
    (tmp_path / "b.txt").write_text("You are\na clerk.\n")
    assert read_prompts(tmp_path / "b.txt") == [KnownPrompt("b.txt", "You are\na clerk.\n")]
    for wrong in ('{"prompt": "a", "messages": []}', '{"text": "a"}', '{"prompt": 3}', "{"):
        (tmp_path / "c.jsonl").write_text('{"prompt": "fine"}\n' + wrong)
        with pytest.raises(ConfigError, match="c.jsonl, line 2"):
            read_prompts(tmp_path / "c.jsonl")
    with pytest.raises(ConfigError, match="empty"):
        (tmp_path / "d").write_text("\n")
        read_prompts(tmp_path / "d")


def test_users_errors(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    for arguments, text in (
        ([f"--log={tmp_path}/a.txt"], "a.txt, line 1"),
        ([f"--prompts={tmp_path}/a.txt", "--base_url=http://127.0.0.1:9"], "start the server"),
    ):
        code, document, error = warm(*arguments)
        assert (code, document) == (2, None) and text in error and "Traceback" not in error
    with pytest.raises(ConfigError, match="none.*cannot be read"):
        read_prompts(tmp_path / "none")


def test_against_a_server(program, tmp_path):
    """The scripted engine finds half of every prompt, whatever came before."""
    server = program("serve.py", "--port=0")
    url = server.stdout.readline().split()[3]
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": [10, 11, 12, 13, 14, 15, 16, 17]}\n{"messages": [{"role": "user", "content": "hello"}]}\n'
    )
    code, document, error = warm(f"--prompts={tmp_path}/p.jsonl", f"--base_url={url}")
    assert code == 0, error
    first, second = document["results"]
    assert (first["name"], first["tokens"], first["cached_before"], first["value"]) == ("p.jsonl:1", 8, 4, 4)
    assert second["tokens"] > 5 and second["value"] == second["tokens"] // 2
    code, document, error = warm(f"--prompts={tmp_path}/p.jsonl", f"--base_url={url}", "--measure", "--quick")
    assert code == 0, error
    assert [ratio["name"] for ratio in document["ratios"]] == ["mean TTFT of the first requests: cold / warm"]
    code, document, error = warm(f"--prompts={tmp_path}/p.jsonl", f"--base_url={url}", "--served_model_name=other")
    assert code == 1 and "HTTP 404" in document["checks"][0]["problems"][0]


@pytest.mark.slow
def test_the_first_users_of_the_demo_model_gain(tmp_path):
    from tests.support.demo_server import demo_server

    system = "You are the clerk of a library. " + " ".join(
        f"Rule {i}: books of shelf {i} stay here." for i in range(25)
    )
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": [{"role": "system", "content": system}]}))
    with demo_server() as (url, _):
        code, document, error = warm(f"--prompts={tmp_path}/p.jsonl", f"--base_url={url}")
        assert code == 0, error
        (told,) = document["results"]
        assert told["tokens"] > 250 and told["cached_before"] == 0 and told["value"] >= told["tokens"] - 16
        code, document, error = warm(f"--prompts={tmp_path}/p.jsonl", f"--base_url={url}", "--measure")
        assert code == 0, error
        assert document["ratios"][0]["value"] > 1.5


def test_a_pool_too_small_is_told(monkeypatch):
    """What is found at the end counts, not what was sent."""
    import asyncio

    held = []

    async def server(session, url, body, **_):
        prompt = body["prompt"]
        cached = len(prompt) if prompt in held else 0
        held[:] = [*(one for one in held if one != prompt), prompt][-1:]  # room for one
        return cache_warming.Outcome(0.0, prompt_len=len(prompt), cached_tokens=cached, latency=0.1)

    monkeypatch.setattr(cache_warming, "ask", server)
    prompts = [KnownPrompt("a", "aaaa"), KnownPrompt("b", "bbbb")]
    assert [one.cached_after for one in asyncio.run(cache_warming.warm(None, "", "m", prompts))] == [0, 0]
    assert asyncio.run(cache_warming.warm(None, "", "m", prompts[:1]))[0].cached_after == 4
