"""Whatever a client sends, it gets an OpenAI error object with the right status, and never a 5xx."""

import json
import time

import pytest

MESSAGES = [{"role": "user", "content": "hi"}]


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    assert isinstance(error["message"], str) and len(error["message"]) > 5 and "Traceback" not in error["message"]
    return error


@pytest.mark.parametrize(
    "body, param, text",
    [
        ({"temperature": -1}, "temperature", "-1"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"top_p": 1.5}, "top_p", "1.5"),
        ({"top_k": -2}, "top_k", "-2"),
        ({"min_p": 2}, "min_p", "2"),
        ({"n": 0}, "n", "1 to 1024"),
        ({"n": 10**9}, "n", "1000000000"),
        ({"n": True}, "n", "integer"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": -5}, "max_tokens", "-5"),
        ({"max_tokens": 10**40}, "max_tokens", "maximum context length is 256"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "9"),
        ({"min_tokens": 10**12, "max_tokens": None}, "min_tokens", "fit"),
        ({"stop": [""]}, "stop", "0 characters"),
        ({"stop": ["a"] * 65}, "stop", "65"),
        ({"stop": 5}, "stop", "a string or a list of strings"),
        ({"stop": "\ud800"}, "stop", "Unicode"),
        ({"stop_token_ids": [10**12]}, "stop_token_ids", "1000000000000"),
        ({"stop_token_ids": list(range(33))}, "stop_token_ids", "33"),
        ({"seed": 2**70}, "seed", "64 bits"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"cache_salt": ""}, "cache_salt", "1 to 1024"),
        ({"presence_penalty": 2.5}, "presence_penalty", "-2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "-2 to 2"),
        ({"frequency_penalty": "1"}, "frequency_penalty", "number"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0.01 to 100"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "token id 5 is 101"),
        ({"logit_bias": {"five": 1}}, "logit_bias", "'five', which is not a token id"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "'-1', which is not a token id"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias", "not a token id"),
        ({"logit_bias": {"999999999": 1}}, "logit_bias", "ids of this model"),
        ({"logit_bias": {"7": 1, "07": 2}}, "logit_bias", "twice"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "301 entries; at most 300"),
        ({"logit_bias": [[5, 1]]}, "logit_bias", ""),
        ({"logit_bias": {"5": "x"}}, "logit_bias", "number"),
        ({"response_format": "json"}, "response_format", "response_format"),
        ({"structured_outputs": ["a"]}, "structured_outputs", "structured_outputs"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"use_beam_search": True}, "use_beam_search", "not supported"),
        ({"prompt_logprobs": 6}, "prompt_logprobs", "0 to 5"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "-1; it must be at least 0"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "0; it must be at least 1, or -1"),
        ({"truncate_prompt_tokens": 2.5}, "truncate_prompt_tokens", "integer"),
        ({"truncation_side": "right"}, "truncation_side", "not supported"),
        ({"return_token_ids": 1}, "return_token_ids", "boolean"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids", "not supported"),
        ({"request_id": ""}, "request_id", "0 characters; 1 to 1024"),
        ({"request_id": "\ud800"}, "request_id", "Unicode"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": "yes"}}, "stream_options", "boolean"),
        ({"model": "gpt-4"}, "model", "`gpt-4` does not exist"),
        ({"model": "\ud800"}, "model", "does not exist"),
    ],
)
@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_fields_out_of_range_are_named(server, endpoint, body, param, text):
    start = {"messages": MESSAGES} if endpoint.startswith("chat") else {"prompt": "hi"}
    # json.dumps writes lone surrogates as escapes, which is how a client could send them.
    content = json.dumps(start | {"max_tokens": 4} | body)
    response = server.http.post(f"/v1/{endpoint}", content=content, headers={"content-type": "application/json"})
    error = error_of(response, 404 if param == "model" else 400)
    assert error["param"] == param and text in error["message"], error


@pytest.mark.parametrize(
    "body, param, text",
    [
        ({}, "prompt", "prompt is missing"),
        ({"prompt": None}, "prompt", "a list of token ids"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "0 sequences"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": 5}, "prompt", "a list of token ids"),
        ({"prompt": [1, "a"]}, "prompt", "a list of token ids"),
        ({"prompt": [True]}, "prompt", "a list of token ids"),
        ({"prompt": [1.5]}, "prompt", "a list of token ids"),
        ({"prompt": [-1]}, "prompt", "-1"),
        ({"prompt": [10**30]}, "prompt", "token id"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
        ({"prompt": "x", "logprobs": 6}, "logprobs", "0 to 5"),
        ({"prompt": "x", "logprobs": -1}, "logprobs", "-1"),
        ({"prompt": "x", "echo": True, "logprobs": 6}, "logprobs", "0 to 5"),
        ({"prompt": "x", "echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens", "more than max_tokens = 0"),
        ({"prompt": "x", "echo": False, "max_tokens": 0}, "max_tokens", "at least 1"),
        ({"prompt": ["x"] * 600, "n": 2}, "prompt", "1200 sequences"),
        ({"prompt": "\udfff"}, "prompt", "Unicode"),
    ],
)
def test_completion_requests_at_fault(server, body, param, text):
    content = json.dumps(body)
    response = server.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    error = error_of(response, 400)
    assert error["param"] == param and text in error["message"], error


@pytest.mark.parametrize(
    "body, param, text",
    [
        ({}, "messages", "messages is missing"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": [{"content": "x"}]}, "messages", "messages.0.role is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "a string, a list of parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "image_url"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "prompt", "Unicode"),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0].function", "must be an object"),
        ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", "logprobs"),
        (
            {"messages": MESSAGES, "logprobs": True, "top_logprobs": 9},
            "top_logprobs",
            "9 top_logprobs asked for; 0 to 5",
        ),
        ({"messages": MESSAGES, "max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens", "tokens is 0"),
        ({"messages": MESSAGES, "max_completion_tokens": 999}, "max_completion_tokens", "requested 999 output tokens"),
        (
            {"messages": MESSAGES, "max_completion_tokens": 3, "min_tokens": 4},
            "min_tokens",
            "4, more than max_completion_tokens = 3",
        ),
        ({"messages": MESSAGES, "chat_template": "{{ x }}"}, "chat_template", "not supported"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        (
            {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "both",
        ),
    ],
)
def test_chat_requests_at_fault(server, body, param, text):
    content = json.dumps(body)
    response = server.http.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    error = error_of(response, 400)
    assert error["param"] == param and text in error["message"], error


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"5", b"\xff\xfe", b'{"prompt": "x", "temperature": NaN}', b"[" * 100_000,
        b'{"prompt": "x", "temperature": 1e999}', b'{"prompt": "x", "top_k": 1' + b"0" * 6000 + b"}",
        b'{"prompt": "x", "n": Infinity}', b'{"prompt": "x", "max_tokens": 1.5}', b'{"prompt": "x", "stream": "yes"}',
    ],
)  # fmt: skip
def test_bad_bodies(server, content):
    response = server.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    error_of(response, 400)


@pytest.mark.parametrize(
    "content, where",
    [
        (b'{"prompt": "x", "\\ud800": 1}', "The request body"),
        (b'{"messages": [{"role": "user", "content": "x", "\\ud800": 1}]}', "messages.0"),
    ],
)
def test_half_a_surrogate_pair_in_a_fields_name(server, content, where):
    path = "/v1/completions" if b"prompt" in content else "/v1/chat/completions"
    assert error_of(server.http.post(path, content=content), 400)["message"].startswith(f"{where} holds half of a")


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1.5] * 200_000},
        {"prompt": [[1.5] * 200_000]},
        {"prompt": ["x"] * 200_000 + [1]},
        {"prompt": "x", "stop": [1] * 200_000},
        {"prompt": "x", "logit_bias": {str(i): "x" for i in range(200_000)}},
        {"messages": [1] * 200_000},
        {"messages": [{"role": "user", "content": [1] * 200_000}]},
    ],
)
def test_many_mistakes_cost_no_more_than_one(server, body):
    """Telling them all took 14 s for 1.5 MB, in which the server answered nobody."""
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    content = json.dumps(body).encode()
    begin = time.monotonic()
    error_of(server.http.post(path, content=content), 400)
    assert time.monotonic() - begin < 2


def test_other_content_types_and_none(server):
    ok = server.http.post("/v1/completions", content=b'{"prompt": "x"}')
    assert ok.status_code == 200
    form = server.http.post("/v1/completions", data={"prompt": "x"})
    assert "application/json" in error_of(form, 400)["message"]


def test_a_prompt_that_is_too_long_names_the_numbers(server):
    error = error_of(server.post("/v1/completions", prompt=[5] * 256, max_tokens=1), 400)
    assert error["param"] == "input_tokens"
    assert "maximum context length is 256 tokens" in error["message"] and "256 input tokens" in error["message"]
    error = error_of(server.post("/v1/completions", prompt=[5] * 250, max_tokens=7), 400)
    assert error["param"] == "max_tokens" and "at most 6 output tokens" in error["message"]
    assert server.post("/v1/completions", prompt=[5] * 250, max_tokens=6).status_code == 200


def test_one_bad_prompt_of_several_starts_nothing(server):
    before = len(server.engine.added)
    error_of(server.post("/v1/completions", prompt=[[5], [10**6]], max_tokens=1), 400)
    assert len(server.engine.added) == before


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_the_engine_is_an_http_error_even_when_streaming(server, stream):
    error = error_of(server.post("/v1/completions", prompt=["a", "b"], cache_salt="refuse", stream=stream), 400)
    assert error["param"] == "cache_salt" and "refused by the engine" in error["message"]


def test_unknown_paths_and_methods(server):
    assert error_of(server.http.get("/v1/nothing"), 404)["type"] == "NotFoundError"
    assert error_of(server.post("/v1/responses", input="x"), 404)["message"] == "There is no POST /v1/responses here."
    assert "does not take GET" in error_of(server.http.get("/v1/completions"), 405)["message"]


def test_unknown_fields_are_ignored_and_logged_once(server, caplog):
    for _ in range(3):
        assert server.post("/v1/completions", prompt="x", frobnicate=1, another_one=None).status_code == 200
    lines = [record.getMessage() for record in caplog.records if "unknown request field" in record.getMessage()]
    assert sorted(lines) == [
        "ignored the unknown request field 'another_one'",
        "ignored the unknown request field 'frobnicate'",
    ]


@pytest.mark.parametrize("tokens", [[-1], [10**9], "x", None])
def test_detokenize_errors(server, tokens):
    assert error_of(server.post("/detokenize", tokens=tokens), 400)["param"] == "tokens"


def test_tokenize_needs_one_input(server):
    error_of(server.post("/tokenize"), 400)
    error_of(server.post("/tokenize", prompt="x", messages=MESSAGES), 400)


def test_api_key(serve):
    server = serve(guards={"api_keys": ["sekret"]})
    for headers in (
        {},
        {"authorization": "Bearer no"},
        {"authorization": "sekret"},
        {"authorization": "Bearer sekret2"},
    ):
        error = error_of(server.http.post("/v1/completions", content=b"{", headers=headers), 401)
        assert error["type"] == "AuthenticationError" and "sekret" not in error["message"]
    assert server.http.get("/v1/models").status_code == 401 and server.http.get("/health").status_code == 200
    good = {"authorization": "Bearer sekret"}
    assert server.http.post("/v1/completions", json={"prompt": "x"}, headers=good).status_code == 200


def test_a_template_variable_may_have_any_name(server):
    names = {name: 1 for name in ("self", "args", "kwargs", "cls", "environment", "variables", "caller", "loop")}
    body = {"messages": MESSAGES, "max_tokens": 1, "chat_template_kwargs": names}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(server):
    text = "hello world " * 1_000_000
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/tokenize", {"prompt": text}),
    ):
        begin = time.monotonic()
        error = error_of(server.http.post(path, json=body), 400)
        assert time.monotonic() - begin < 5  # tokenising 12 MB takes 13 s
        assert "maximum context length" in error["message"] and "characters" in error["message"]
