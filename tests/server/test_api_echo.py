"""The prompt in the answer: echo, its log-probabilities, token ids; what lm-eval's loglikelihood reads."""

import json

import pytest

from jaxkv.core.request import TokenLogprobs

OUTPUT = "né 👋"


def chunks_of(response):
    assert response.status_code == 200, response.text
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def joined(response, count):
    """The choices of a stream as they are whole: texts, columns and ids joined."""
    choices = [{"text": "", "logprobs": None, "token_ids": []} for _ in range(count)]
    for chunk in chunks_of(response):
        for new in chunk["choices"]:
            choice = choices[new["index"]]
            choice["text"] += new["text"]
            choice["finish_reason"] = new["finish_reason"]
            choice["token_ids"] += new.get("token_ids", [])
            if "prompt_token_ids" in new:
                assert "prompt_token_ids" not in choice
                choice["prompt_token_ids"] = new["prompt_token_ids"]
            if new["logprobs"] is not None:
                before = choice["logprobs"] or dict.fromkeys(new["logprobs"], [])
                choice["logprobs"] = {name: before[name] + column for name, column in new["logprobs"].items()}
    return choices


def ask(server, stream, **body):
    response = server.post("/v1/completions", stream=stream, **body)
    if not stream:
        assert response.status_code == 200, response.text
        return response.json()["choices"]
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    return joined(response, len(prompts) * body.get("n", 1))


@pytest.fixture
def server(serve):
    return serve(text=OUTPUT, tokens_per_step=2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 40])
def test_loglikelihood_requests(server, stream, max_tokens):
    """A batch as lm-eval sends it: each token of prompt and output with its own and the likeliest log-probability."""
    prompts = [[10, 11, 12], [20, 21], [30]]
    choices = ask(
        server, stream, prompt=prompts, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0, seed=1234
    )
    text = server.tokenizer.token_text
    output = [*server.tokenizer.encode(OUTPUT, False), server.tokenizer.eos_token_id][:max_tokens]
    for prompt, choice in zip(prompts, choices, strict=True):
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == [text(i) for i in prompt + output]
        assert logprobs["token_logprobs"] == [None] + [-0.25] * (len(prompt) - 1) + [-0.5] * len(output)
        assert logprobs["top_logprobs"][0] is None
        # The likeliest one is the token itself here, and equals it to the bit.
        for value, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
            assert value == max(top.values())
        assert len(logprobs["text_offset"]) == len(logprobs["tokens"])
        assert choice["finish_reason"] == ("stop" if max_tokens == 40 else "length")
    sent = server.engine.added
    assert [request.sampling.prompt_logprobs for request in sent] == [1, 1, 1]
    assert [request.sampling.max_tokens for request in sent] == [max(1, max_tokens)] * 3


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**40])
def test_an_echo_of_what_is_no_token_is_refused(server, token_id):
    response = server.post("/v1/completions", prompt=[5, token_id], echo=True)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "prompt" and f"token id {token_id}" in error["message"]


@pytest.mark.parametrize("logprobs", [None, 0])
def test_max_tokens_0_shows_no_token(server, logprobs):
    body = server.post("/v1/completions", prompt="One two", echo=True, max_tokens=0, logprobs=logprobs).json()
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("One two", "length", None)
    assert body["usage"]["completion_tokens"] == 0
    assert (choice["logprobs"] is None) == (logprobs is None)
    assert server.engine.added[-1].sampling.prompt_logprobs == logprobs


@pytest.mark.parametrize(
    "text", ["One two", "né 👋 wörld", "<|im_start|>user\nhi<|im_end|>", "  two  spaces ", "👩‍👩‍👧‍👦x"]
)
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("as_ids", [False, True])
def test_text_offsets_point_at_the_tokens(serve, request, kind, text, as_ids):
    tokenizer = request.getfixturevalue(kind)
    server = serve(tokenizer=tokenizer, text=OUTPUT)
    ids = tokenizer.encode(text)
    body = {"prompt": ids if as_ids else text, "echo": True, "logprobs": 0, "max_tokens": 40}
    [choice] = server.post("/v1/completions", skip_special_tokens=False, **body).json()["choices"]
    logprobs, whole = choice["logprobs"], choice["text"]
    assert whole.startswith(text) or as_ids
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    checked = 0
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if "\ufffd" not in token and token not in ("<s>", "</s>", "<|im_end|>"):
            at_start = offset == 0 and token.startswith(" ")  # the space that sentencepiece puts in front
            assert whole.startswith(token[at_start:], offset), (token, offset, whole)
            checked += 1
    assert checked >= 2


def test_the_parts_of_one_character_begin_where_it_does(server):
    ids = server.tokenizer.encode("a👋b", False)
    assert len(ids) > 3
    [choice] = server.post("/v1/completions", prompt=ids, echo=True, logprobs=0, max_tokens=0).json()["choices"]
    assert choice["text"] == "a👋b" and choice["logprobs"]["text_offset"] == [0, *[1] * (len(ids) - 2), 2]


def test_special_tokens_left_out_of_an_echo_take_no_room(server):
    ids = server.tokenizer.encode("<|im_start|>hi<|im_end|>a", False)
    body = {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0}
    [hidden] = server.post("/v1/completions", **body).json()["choices"]
    [shown] = server.post("/v1/completions", **body, skip_special_tokens=False).json()["choices"]
    assert (hidden["text"], shown["text"]) == ("hia", "<|im_start|>hi<|im_end|>a")
    assert hidden["logprobs"]["text_offset"][:2] == [0, 0] and hidden["logprobs"]["text_offset"][-1] == 2
    assert shown["logprobs"]["text_offset"][:2] == [0, 12] and shown["logprobs"]["text_offset"][-1] == 24


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("prompt", ["One", ["One", "Two"], [[10, 11], [20, 21, 22]]])
def test_a_streamed_echo_is_the_whole_one(server, prompt, logprobs):
    body = {"prompt": prompt, "n": 2, "echo": True, "logprobs": logprobs, "max_tokens": 40, "return_token_ids": True}
    whole = server.post("/v1/completions", **body).json()["choices"]
    streamed = ask(server, True, **body)
    assert len(whole) == len(streamed) == (4 if isinstance(prompt, list) else 2)
    for one, other in zip(whole, streamed, strict=True):
        assert one["token_ids"] == [*server.tokenizer.encode(OUTPUT, False), server.tokenizer.eos_token_id]
        assert {name: one[name] for name in other} == other


def test_an_echo_waits_for_the_prompts_logprobs(server):
    """Of several sequences one brings them, and another may be faster."""
    step, late = server.engine.step, []

    def second_first():
        outputs = step()
        if len(outputs) == 2 and not late:
            late.append(outputs.pop(0))
        elif late and late[0] is not None:
            outputs.insert(0, late[0])
            late[0] = None
        return outputs

    server.engine.step = second_first
    chunks = chunks_of(
        server.post("/v1/completions", prompt="One", n=2, echo=True, logprobs=0, max_tokens=3, stream=True)
    )
    assert late == [None]
    texts = {0: [], 1: []}
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]].append(choice["text"])
        if len(texts[choice["index"]]) == 1:
            assert choice["text"] == "One" and choice["logprobs"]["token_logprobs"][0] is None
    assert [len(pieces) for pieces in texts.values()] == [4, 4]


def test_prompt_logprobs_of_completions_and_chat(server):
    add = server.engine.add

    def of(token_id):
        return TokenLogprobs(token_id, -2.5, 7, ((5, -0.125), (6, float("-inf"))))

    def step():
        return [
            output._replace(prompt_logprobs=(None, *map(of, server.engine.prompt[1:])))
            if output.prompt_logprobs is not None
            else output
            for output in plain_step()
        ]

    def added(request):
        server.engine.prompt = request.prompt_token_ids
        add(request)

    plain_step, server.engine.step, server.engine.add = server.engine.step, step, added
    text = server.tokenizer.token_text

    def table(token_id, count):
        tops = {"5": (-0.125, 1), "6": (-9999.0, 2)}
        entries = dict(list(tops.items())[:count]) | {str(token_id): (-2.5, 7)}
        return {i: {"logprob": p, "rank": r, "decoded_token": text(int(i))} for i, (p, r) in entries.items()}

    for count in (0, 1, 2):
        body = server.post("/v1/completions", prompt=[10, 11, 12], prompt_logprobs=count, max_tokens=1).json()
        [choice] = body["choices"]
        assert choice["prompt_logprobs"] == [None, table(11, count), table(12, count)] and choice["logprobs"] is None
    body = server.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], prompt_logprobs=1, max_tokens=1, n=2
    ).json()
    assert body["prompt_logprobs"] == [None, *[table(i, 1) for i in server.engine.added[-1].prompt_token_ids[1:]]]
    assert "prompt_logprobs" not in body["choices"][0]


def test_echo_and_prompt_logprobs_may_differ(server):
    body = {"prompt": [10, 11], "echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 1}
    [choice] = server.post("/v1/completions", **body).json()["choices"]
    assert server.engine.added[-1].sampling.prompt_logprobs == 3
    assert list(choice["prompt_logprobs"][1]) == ["11"] and len(choice["logprobs"]["tokens"]) == 3


def test_token_ids_of_chat(server):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "return_token_ids": True, "n": 2}
    whole = server.post("/v1/chat/completions", **body).json()
    prompt, output = list(server.engine.added[-1].prompt_token_ids), server.tokenizer.encode(OUTPUT, False)[:4]
    assert whole["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in whole["choices"]] == [output, output]
    chunks = chunks_of(server.post("/v1/chat/completions", stream=True, **body))
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [prompt]
    assert "prompt_token_ids" in chunks[0]
    for index in range(2):
        pieces = [c["choices"][0].get("token_ids") for c in chunks if c["choices"][0]["index"] == index]
        assert pieces == [None, *[[i] for i in output]]


def test_tokens_shown_as_ids(server):
    first = server.tokenizer.encode(OUTPUT, False)[0]
    body = {"max_tokens": 1, "return_tokens_as_token_ids": True}
    [choice] = server.post("/v1/completions", prompt=[10, 11], logprobs=2, echo=True, **body).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:10", "token_id:11", f"token_id:{first}"]
    assert choice["logprobs"]["top_logprobs"][2] == {f"token_id:{first}": -0.5, f"token_id:{first + 1}": -1.5}
    reply = server.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=1, **body
    ).json()
    [entry] = reply["choices"][0]["logprobs"]["content"]
    assert entry["token"] == entry["top_logprobs"][0]["token"] == f"token_id:{first}"
    assert bytes(entry["bytes"]) == server.tokenizer.token_bytes[first]


@pytest.mark.parametrize("keep, kept", [(2, 2), (5, 5), (9, 5), (-1, 5)])
def test_truncated_prompts_keep_their_end(server, keep, kept):
    prompt = [10, 11, 12, 13, 14]
    body = server.post("/v1/completions", prompt=prompt, truncate_prompt_tokens=keep, max_tokens=1, echo=True).json()
    assert list(server.engine.added[-1].prompt_token_ids) == prompt[-kept:]
    assert body["usage"]["prompt_tokens"] == kept
    assert body["choices"][0]["text"].startswith(server.tokenizer.decode(prompt[-kept:]))


def test_truncation_to_what_fits(server):
    server.post("/v1/completions", prompt=[10] * 300, truncate_prompt_tokens=-1, max_tokens=20)
    assert len(server.engine.added[-1].prompt_token_ids) == 256 - 20
    long = [{"role": "user", "content": "x" * 400}]
    assert server.post("/v1/chat/completions", messages=long, truncate_prompt_tokens=-1).status_code == 200
    assert len(server.engine.added[-1].prompt_token_ids) == 255


def test_a_request_id_of_the_clients_own(server):
    body = {"prompt": "x", "max_tokens": 1, "request_id": "mine"}
    assert [server.post("/v1/completions", **body).json()["id"] for _ in range(2)] == ["cmpl-mine"] * 2
    assert len({request.request_id for request in server.engine.added}) == 2


def test_usage_in_every_chunk(server):
    body = {"prompt": [10, 11, 12], "max_tokens": 3, "echo": True, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(server.post("/v1/completions", **body, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 3]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3} and chunks[-1]["choices"] == []
    only = chunks_of(server.post("/v1/completions", **body, stream_options={"continuous_usage_stats": True}))
    assert all("usage" not in chunk for chunk in only)
