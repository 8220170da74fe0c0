"""What the two generation endpoints answer, whole and streamed, on a real port."""

import json

import pytest

TEXT = "Hello 👋 wörld!"


def events(response):
    """The JSON of each server-sent event; checks the framing and the final [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    return [json.loads(block[len("data: ") :]) for block in blocks[:-2]]


def chat(server, content="hi", **body):
    return server.post("/v1/chat/completions", model="fake", messages=[{"role": "user", "content": content}], **body)


def test_completion(server):
    prompt = "Once upon"
    body = server.post("/v1/completions", model="fake", prompt=prompt, max_tokens=100).json()
    num_prompt = len(server.tokenizer.encode(prompt))
    num_output = len(server.tokenizer.encode(TEXT)) + 1  # and end-of-sequence
    assert body.pop("id").startswith("cmpl-") and body.pop("created") > 1.7e9
    assert body == {
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": num_prompt // 2},
        },
    }


def test_completions_stop_after_16_tokens_unless_told(server):
    server.script = lambda request: [10] * 300
    body = server.post("/v1/completions", prompt="x", max_tokens=None).json()
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (16, "length")
    server.script = default_script(server)


def default_script(server):
    ids = server.tokenizer.encode(TEXT, add_special_tokens=False)
    return lambda request: [*ids, server.tokenizer.eos_token_id] + [3] * 500


def test_chat(server):
    response = chat(server, max_completion_tokens=100, max_tokens=1)
    body = response.json()
    assert response.headers["content-type"] == "application/json"
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": TEXT, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    sent = server.engine.added[-1]
    assert server.tokenizer.decode(sent.prompt_token_ids, False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert sent.sampling.max_tokens == 100


def test_chat_without_a_limit_may_fill_the_context(server):
    chat(server, max_tokens=None)
    assert server.engine.added[-1].sampling.max_tokens is None


@pytest.mark.parametrize("tokens_per_step", [1, 4, 64])
def test_streamed_text_is_the_whole_text_one_event_a_token(serve, tokens_per_step):
    server = serve(tokens_per_step=tokens_per_step)
    chunks = events(chat(server, stream=True))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == TEXT
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    # Every token has its own event, however many a step brings, also the emoji's parts and the end of sequence.
    assert len(choices) == 1 + len(server.tokenizer.encode(TEXT)) + 1


def test_streamed_completion_with_usage(server):
    whole = server.post("/v1/completions", prompt="hey", max_tokens=50).json()
    chunks = events(
        server.post("/v1/completions", prompt="hey", max_tokens=50, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == TEXT
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])


def test_no_usage_unless_asked(server):
    assert all("usage" not in chunk for chunk in events(chat(server, stream=True, stream_options=None)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt, count", [("a", 1), (["a", "bc"], 2), ([1, 2, 3], 1), ([[4], [5, 6]], 2)])
def test_every_form_of_prompt_times_n(server, prompt, count, stream):
    def script(request):
        number, _, sequence = request.request_id.rpartition("-")[2].partition("#")
        return [*server.tokenizer.encode(f"<{2 * int(number) + int(sequence or 0)}>"), 2]

    server.script = script
    response = server.post("/v1/completions", prompt=prompt, n=2, seed=7, max_tokens=30, stream=stream)
    texts = dict.fromkeys(range(2 * count), "")
    for chunk in events(response) if stream else [response.json()]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {i: f"<{i}>" for i in range(2 * count)}
    sent = server.engine.added[-2 * count :]
    assert [request.sampling.seed for request in sent] == [7, 8] * count
    assert sent[0].prompt_token_ids == sent[1].prompt_token_ids
    if isinstance(prompt, list) and not isinstance(prompt[0], str):
        assert sent[0].prompt_token_ids == tuple(prompt if isinstance(prompt[0], int) else prompt[0])
    if not stream:
        usage = response.json()["usage"]
        assert usage["prompt_tokens"] == sum(len(request.prompt_token_ids) for request in sent[::2])
    server.script = default_script(server)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_across_tokens_end_the_engines_request(serve, stream):
    server = serve(text="Hello there, world", tokens_per_step=2)
    response = server.post("/v1/completions", prompt="x", max_tokens=99, stop=["re, w", "zzz"], stream=stream)
    if stream:
        chunks = [chunk["choices"][0] for chunk in events(response)]
        text, last = "".join(c["text"] for c in chunks), chunks[-1]
    else:
        [last] = response.json()["choices"]
        text = last["text"]
        sent = len(server.tokenizer.encode("Hello there, w"))
        assert response.json()["usage"]["completion_tokens"] <= sent + 3
    assert (text, last["finish_reason"], last["stop_reason"]) == ("Hello the", "stop", "re, w")
    assert server.engine.finished == [server.engine.added[0].request_id]


def test_a_held_beginning_of_a_stop_string_is_not_lost(serve):
    server = serve(text="maybe sto")
    assert (
        server.post("/v1/completions", prompt="x", max_tokens=99, stop="stop").json()["choices"][0]["text"]
        == "maybe sto"
    )


def test_sampling_fields_reach_the_engine(server):
    chat(
        server,
        temperature=0.25,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        seed=-5,
        stop=None,
        stop_token_ids=[7],
        ignore_eos=True,
        min_tokens=2,
        repetition_penalty=1.25,
        presence_penalty=-0.5,
        frequency_penalty=2,
        logit_bias={"5": -100, "12": 1.5},
        max_tokens=9,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        priority=-3,
        cache_salt="s",
    )
    request = server.engine.added[-1]
    params = request.sampling
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.25, 0.5, 3, 0.1)
    assert (params.seed, params.stop_token_ids, params.ignore_eos) == ((-5) % 2**31, (7,), True)
    assert (params.min_tokens, params.max_tokens, params.skip_special_tokens) == (2, 9, False)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.25, -0.5, 2)
    assert params.logit_bias == ((5, -100), (12, 1.5)) and params.prompt_logprobs is None
    assert params.include_stop_str_in_output and (request.priority, request.cache_salt) == (-3, "s")


def test_null_fields_are_defaults(server):
    fields = (
        "n stream stream_options max_tokens temperature top_p top_k min_p seed stop stop_token_ids ignore_eos "
        "min_tokens logprobs top_logprobs tools tool_choice response_format logit_bias user frequency_penalty "
        "presence_penalty repetition_penalty "
        "skip_special_tokens add_generation_prompt continue_final_message cache_salt priority best_of"
    )
    assert chat(server, **dict.fromkeys(fields.split())).json()["choices"][0]["message"]["content"] == TEXT


def test_neutral_values_of_unsupported_fields_pass(server):
    neutral = {
        "best_of": 1,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": False,
    }
    assert chat(server, **neutral).status_code == 200


def test_completion_logprobs(server):
    [choice] = server.post("/v1/completions", prompt="x", max_tokens=3, logprobs=2, temperature=0).json()["choices"]
    ids = server.tokenizer.encode(TEXT)[:3]
    texts = [server.tokenizer.token_text(i) for i in ids]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == texts and logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["text_offset"] == [0, len(texts[0]), len(texts[0]) + len(texts[1])]
    assert [max(top, key=top.get) for top in logprobs["top_logprobs"]] == texts
    for token_id, top in zip(ids, logprobs["top_logprobs"], strict=True):
        second = server.tokenizer.token_text(token_id + 1)  # parts of characters may look alike: the likelier one stays
        assert top == {second: -1.5} | {server.tokenizer.token_text(token_id): -0.5}


def test_completion_logprobs_zero_reports_the_chosen_token(server):
    [choice] = server.post("/v1/completions", prompt="x", max_tokens=1, logprobs=0).json()["choices"]
    assert list(choice["logprobs"]["top_logprobs"][0].values()) == [-0.5] == choice["logprobs"]["token_logprobs"]


def test_chat_logprobs_whole_and_streamed(server):
    [choice] = chat(server, max_tokens=4, logprobs=True, top_logprobs=3).json()["choices"]
    content = choice["logprobs"]["content"]
    first = server.tokenizer.encode(TEXT)[0]
    assert content[0]["token"] == server.tokenizer.token_text(first) and content[0]["logprob"] == -0.5
    assert bytes(content[0]["bytes"]) == server.tokenizer.token_bytes[first]
    assert [entry["logprob"] for entry in content[0]["top_logprobs"]] == [-0.5, -1.5, -9999.0]
    chunks = events(chat(server, max_tokens=4, logprobs=True, top_logprobs=3, stream=True))
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content and len(content) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_echo(server, stream):
    response = server.post("/v1/completions", prompt=["One", "Two"], echo=True, max_tokens=50, stream=stream)
    texts = ["", ""]
    for chunk in events(response) if stream else [response.json()]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [f"One{TEXT}", f"Two{TEXT}"]


def test_content_parts_and_null_content(server):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "c"},
    ]
    assert server.post("/v1/chat/completions", messages=messages, max_tokens=5).status_code == 200
    text = server.tokenizer.decode(server.engine.added[-1].prompt_token_ids, False)
    assert "user\na\nb<|im_end|>" in text and "assistant\n<|im_end|>" in text


def test_continue_final_message(server):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer"}]
    assert server.post("/v1/chat/completions", messages=messages, continue_final_message=True, max_tokens=5).is_success
    assert server.tokenizer.decode(server.engine.added[-1].prompt_token_ids, False).endswith("assistant\nThe answer")


def test_jinja_in_content_is_inert(server):
    chat(server, "{{ 7*7 }}{% for x in y %}", max_tokens=5)
    assert "{{ 7*7 }}{% for x in y %}" in server.tokenizer.decode(server.engine.added[-1].prompt_token_ids, False)


@pytest.mark.parametrize("stream", [False, True])
def test_sentencepiece_output_keeps_its_leading_space(serve, sentencepiece, stream):
    server = serve(tokenizer=sentencepiece, text="hello world")  # encodes with a space in front
    response = server.post("/v1/completions", prompt="th", max_tokens=50, stream=stream)
    chunks = events(response) if stream else [response.json()]
    assert "".join(c["choices"][0]["text"] for c in chunks) == " hello world"


def test_models_version_health(server):
    [card, alias] = server.http.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"], alias["root"]) == ("fake", "model", 256, "fake")
    assert server.http.get("/v1/models/alias").json() == alias
    assert server.http.get("/v1/models/no/such").json()["error"]["code"] == 404
    assert (server.http.get("/health").status_code, server.http.get("/health").content) == (200, b"")
    assert set(server.http.get("/version").json()) == {"version"}
    assert "/v1/chat/completions" in server.http.get("/openapi.json").json()["paths"]


def test_tokenize_and_detokenize(server):
    ids = server.tokenizer.encode("héllo")
    body = server.post(
        "/tokenize", model="fake", prompt="héllo", add_special_tokens=False, return_token_strs=True
    ).json()
    assert body == {
        "count": len(ids),
        "max_model_len": 256,
        "tokens": ids,
        "token_strs": [server.tokenizer.token_text(i) for i in ids],
    }
    assert server.post("/detokenize", tokens=ids).json() == {"prompt": "héllo"}
    tokens = server.post("/tokenize", messages=[{"role": "user", "content": "x"}]).json()["tokens"]
    assert server.tokenizer.decode(tokens, False) == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
