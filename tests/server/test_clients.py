"""Clients that no one here wrote, against `scripts/serve.py` on the demo model: openai, llm, lm-eval."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import openai
import pydantic
import pytest

from tests.support.demo import demo_source, demo_tokenizer
from tests.support.demo_server import demo_server

pytestmark = pytest.mark.clients

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
# (context, continuations): one token and several, spaces at the seam, characters of several tokens.
CHOICES = [
    ("The capital of France is", [" Paris", " London", " the city of Rome"]),
    ("Water freezes at zero degrees ", ["Celsius", "Fahrenheit"]),
    ("Q: How do you say hello in German?\nA:", [" Grüß Gott 👋", " Guten Tag", " Hola, ¿qué tal?"]),
    ("One, two, three, four,", [" five", " five, six, seven", " banana"]),
]
TASK = """
task: demo_choices
dataset_path: json
dataset_kwargs:
  data_files: {{test: {path}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
"""


@pytest.fixture(scope="module")
def url():
    with demo_server() as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


def run(*command, **environment):
    """A program of this environment; returns what it wrote to stdout."""
    program = Path(sys.executable).with_name(command[0])
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [program, *map(str, command[1:])],
        env=os.environ | offline | {name: str(value) for name, value in environment.items()},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_openai_whole_and_streamed(client):
    asked = {"model": "demo", "messages": QUESTION, "temperature": 0, "max_completion_tokens": 32}
    assert client.chat.completions.create(**asked, logprobs=None, seed=None).choices[0].message.content == ANSWER
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ANSWER
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 8
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.content == ANSWER


def test_openai_logprobs(client):
    reply = client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, max_tokens=2, logprobs=True, top_logprobs=2
    )
    first, second = reply.choices[0].logprobs.content
    assert (first.token, second.token) == ("The", " capital")
    assert first.logprob == first.top_logprobs[0].logprob > first.top_logprobs[1].logprob
    echo = client.completions.create(
        model="demo", prompt="The capital of France is", echo=True, logprobs=1, max_tokens=0
    ).choices[0]
    assert echo.text == "The capital of France is" and echo.logprobs.token_logprobs[0] is None
    assert [echo.text[i:].startswith(t) for i, t in zip(echo.logprobs.text_offset, echo.logprobs.tokens)] == [True] * 5


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    country: Literal["France", "Italy"]
    inhabitants: int = pydantic.Field(ge=0, le=99_999_999)


def test_openai_parses_what_it_asked_for(client):
    """`parse` sends the model's JSON Schema, and makes an object of what comes."""
    reply = client.chat.completions.parse(
        model="demo", messages=QUESTION, response_format=City, temperature=0, max_tokens=80
    )
    city = reply.choices[0].message.parsed
    assert isinstance(city, City) and reply.choices[0].finish_reason == "stop"
    many = client.completions.create(
        model="demo", prompt="Is it so?", n=8, temperature=1.5, seed=3, max_tokens=20,
        extra_body={"structured_outputs": {"choice": [" yes", " certainly not", " 👍"]}},
    )  # fmt: skip
    texts = {choice.text for choice in many.choices}
    assert texts <= {" yes", " certainly not", " 👍"} and len(texts) > 1
    assert all(choice.finish_reason == "stop" for choice in many.choices)


def test_openai_error_classes(client, running, byte_level):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="x")
    assert (caught.value.code, caught.value.param, caught.value.type) == ("404", "model", "NotFoundError")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512") as caught:
        client.completions.create(model="demo", prompt=[5] * 600)
    assert caught.value.param == "input_tokens"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=QUESTION, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="takes no tools") as caught:
        tool = {"type": "function", "function": {"name": "now"}}
        client.chat.completions.create(model="demo", messages=QUESTION, tools=[tool])
    assert caught.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match="not valid JSON|JSON object"):
        client.post("/completions", body="{", cast_to=object)
    with running(byte_level, guards={"api_keys": ["right"]}) as fake:
        wrong = openai.OpenAI(base_url=fake.url + "/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            wrong.completions.create(model="fake", prompt="x")
        fake.engine.break_with = ValueError("broken")
        right = openai.OpenAI(base_url=fake.url + "/v1", api_key="right", max_retries=0)
        with pytest.raises(openai.APIError, match="broken"):  # inside a stream whose status was 200
            list(right.completions.create(model="fake", prompt="x", stream=True))
        with pytest.raises(openai.InternalServerError, match="cannot serve"):
            right.completions.create(model="fake", prompt="x")


@pytest.mark.parametrize("streamed", [True, False])
def test_llm_command(url, tmp_path, streamed):
    model = {"model_id": "local", "model_name": "demo", "api_base": f"{url}/v1"}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))
    options = ["-o", "max_tokens", 32, "-o", "temperature", 0, *([] if streamed else ["--no-stream"])]
    said = run("llm", "-m", "local", QUESTION[0]["content"], *options, LLM_USER_PATH=tmp_path)
    assert said.strip() == ANSWER


def tokenizer_folder(path):
    """The demo model's tokenizer as transformers reads it."""
    path.mkdir()
    tokenizer = demo_tokenizer()
    tokenizer.fast.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_lm_eval_loglikelihood_equals_transformers(url, tmp_path):
    from tests.support import torch_oracle

    model = torch_oracle.demo_model(demo_source().path)
    documents = [{"context": context, "choices": choices} for context, choices in CHOICES]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    (tmp_path / "task.yaml").write_text(TASK.format(path=tmp_path / "test.jsonl"))
    arguments = {
        "model": "demo",
        "base_url": f"{url}/v1/completions",
        "tokenizer": tokenizer_folder(tmp_path / "tokenizer"),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 2,
        "max_retries": 1,
        "max_length": 512,
    }
    run(
        "lm_eval", "run", "--model", "local-completions",
        "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()),
        "--include_path", tmp_path, "--tasks", "demo_choices", "--batch_size", 4,
        "--log_samples", "--output_path", tmp_path / "out",
        HF_HOME=tmp_path / "cache",
    )  # fmt: skip
    [samples] = (tmp_path / "out").rglob("samples_*.jsonl")
    encode = demo_tokenizer().encode
    greedy, compared = [], 0
    for sample in map(json.loads, samples.read_text().splitlines()):
        asked = [tuple(value.values()) for value in sample["arguments"].values()]
        for (context, continuation), [response] in zip(asked, sample["resps"], strict=True):
            said = (float(response[0]), response[1] in (True, "True"))
            start = len(encode(context.rstrip(" ")))  # lm-eval counts spaces at the seam to the continuation
            ids = encode(context + continuation)
            rows = torch_oracle.logits(model, tuple(ids)).astype(np.float64)
            rows -= np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1, keepdims=True)) + rows.max(
                -1, keepdims=True
            )
            places = range(start - 1, len(ids) - 1)
            wanted = sum(rows[place, ids[place + 1]] for place in places)
            assert said[0] == pytest.approx(wanted, abs=1e-3), (context, continuation)
            assert said[1] == all(rows[place].argmax() == ids[place + 1] for place in places)
            greedy.append(said[1])
            compared += 1
    assert compared == sum(len(choices) for _, choices in CHOICES)
    assert any(greedy) and not all(greedy)
