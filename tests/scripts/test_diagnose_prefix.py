"""The diagnosis as a user runs it."""

import json
import os
import pathlib
import random
import subprocess
import sys

import pytest
from benchlib.planted_faults import make_example
from benchlib.prompt_files import read_prompts

from jaxkv.core.request_record import RequestRecord
from jaxkv.insight.packing import unpacked
from jaxkv.insight.prompt_log import LogError
from tests.small_tokenizers import byte_level

PROGRAM = pathlib.Path(__file__).parents[2] / "scripts" / "diagnose_prefix.py"


def run(*arguments):
    env = os.environ | {"PYTHONPATH": str(PROGRAM.parents[1])}
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.stdout else None, done.stderr


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "requests.jsonl"
    path.write_text("".join(record.to_json() + "\n" for record in make_example(num_rounds=24).records))
    return path


def findings(document):
    return [row for row in document["results"] if row["metric"] == "finding"]


def test_called_bare_it_finds_what_is_planted(tmp_path):
    pictures = tmp_path / "diagnosis.png", tmp_path / "timeline.png"
    code, document, stderr = run("--quick", f"--plot={pictures[0]}", f"--timeline={pictures[1]}")
    assert code == 0, stderr
    assert len(document["checks"]) == 9 and document["ok"]
    assert "looks like a timestamp" in " ".join(stderr.split())
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    assert document["files"] == list(map(str, pictures))


def test_a_request_is_found_by_the_id_of_its_response(tmp_path):
    path = tmp_path / "log.jsonl"
    tokens = {"block_size": 4, "prompt_token_ids": (1, 2, 3, 4, 5), "output_token_ids": (6,)}
    rows = [RequestRecord(name, i, "stop", 5, 0, 5, 1, **tokens) for i, name in enumerate(("other", "a1b2-0", "a1b2-1"))]
    path.write_text("".join(row.to_json() + "\n" for row in rows))
    for name in ("a1b2-0", "chatcmpl-a1b2", "cmpl-a1b2", "a1b2"):
        _, document, stderr = run(f"--log={path}", f"--request_id={name}", "--capacity_blocks=2")
        (request,) = [row for row in document["results"] if row["metric"] == "request"]
        assert request["request_id"] == "a1b2-0", stderr


def test_a_log_of_one_caller(log):
    code, document, stderr = run(f"--log={log}", "--caller=codes", "--capacity_blocks=700", "--request_id=codes-7")
    assert code == 0, stderr
    changed = next(row for row in findings(document) if row["cause"] == "changed_text")
    assert (changed["position"], changed["callers"]) == (77, [["codes", 24, 24]])
    assert changed["gain"]["after"] > changed["gain"]["before"] and changed["examples"] == []
    (request,) = [row for row in document["results"] if row["metric"] == "request"]
    assert request["common_tokens"] >= 77 and request["causes"]["changed_text"] == 250
    assert "text_here" not in request
    assert document["config"]["hits_are_replayed"] is False and document["checks"] == []


def test_mistakes_are_named(log, tmp_path):
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text(log.read_text().splitlines()[0] + "\n{}\n")
    for arguments, message in (
        ((f"--log={log}", "--caller=nobody"), "caller is 'nobody', of whom there is no request; there are: archive"),
        ((f"--log={log}", "--request_id=x"), "request_id is 'x', which is not in the log; there are "),
        ((f"--log={log}", f"--prompts={log}"), "log and prompts are both set"),
        (
            (f"--log={damaged}",),
            "damaged.jsonl, line 2: no record of a request log (expected a JSON object with schema",
        ),
        (("--log=/no/such/file", "--model=demo", "--show_text"), "/no/such/file"),
    ):
        code, document, stderr = run(*arguments)
        assert (code, document) == (2, None) and message in stderr, stderr
        assert "Traceback" not in stderr


def test_prompts_are_read_with_the_tokenizer(tmp_path):
    tokenizer = byte_level()
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": "Hello there", "user": "u", "cache_salt": "secret"},
        {"prompt": [1, 2, 3], "caller": "c", "arrival": 0.5, "request_id": "mine"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = read_prompts(path, tokenizer)
    assert unpacked(first.prompt) == tokenizer.encode("Hello there")
    assert (first.caller, first.num_tokens, first.request_id) == ("u", len(tokenizer.encode("Hello there")), "line 1")
    assert first.salt is not None and "secret" not in first.salt
    assert (second.caller, second.arrival, second.request_id, second.num_tokens) == ("c", 0.5, "mine", 3)


@pytest.mark.parametrize(
    "line", ["{}", "[]", "nonsense", '{"prompt": ""}', '{"prompt": [9999999]}', '{"prompt": "a", "messages": []}']
)
def test_damaged_prompts_are_refused_by_line(line, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(LogError, match="prompts.jsonl, line 2"):
        read_prompts(path, byte_level())


def test_conversations_with_the_demo_model(tmp_path):
    """Chat prompts with the time in the system message; the tokenizer of a real model, no weights, no jax."""
    rng = random.Random(0)
    rules = "Answer briefly, in the language of the question, and never speak of the weather in the mountains. " * 3
    rows = []
    for i in range(12):
        clock = f"{10 + 7 * i % 14}:{rng.randint(10, 59)}"
        system = f"You help travellers of the southern railway. Now it is {clock}. {rules}"
        question = rng.choice(["Where is", "When leaves", "Who sells"]) + f" the {rng.randint(100, 999)} to the coast?"
        rows.append({"messages": [{"role": "system", "content": system}, {"role": "user", "content": question}]})
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    code, document, stderr = run(f"--prompts={path}", "--show_text")
    assert code == 0, stderr
    (finding,) = [row for row in findings(document) if row["cause"] == "changed_text"]
    assert finding["looks_like"] == ["a timestamp"] and finding["num_requests"] == 12
    assert finding["gain"]["own_after"] > 2 * finding["gain"]["own_before"]
    assert any(text in json.dumps(rows) for text in finding["examples"][0])
    assert "platform" not in document["device"]  # jax was never imported
