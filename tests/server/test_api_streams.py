"""Properties of streams: whatever the tokens, their cuts and the stop strings, a stream joins to the whole response."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

relaxed = settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
texts = st.text(alphabet=st.sampled_from("abehlo wrd\n.é你👋🇩 \u200d"), max_size=25)
stop_strings = st.lists(st.text(alphabet="ab lo你👋", min_size=1, max_size=4), max_size=3)


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def server(request):
    """One for all examples; each sets the script and the tokens a step."""
    tokenizer = request.getfixturevalue(request.param)
    with request.getfixturevalue("running")(tokenizer) as running:
        yield running


def streamed(server, path, body, count):
    """What a client joins: (text, finish_reason, stop_reason, logprobs entries) a choice; the final usage; the chunks."""
    response = server.post(path, stream=True, stream_options={"include_usage": True}, **body)
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    usage = chunks.pop()
    assert usage["choices"] == [] and all(chunk["usage"] is None for chunk in chunks)
    per_choice = [[] for _ in range(count)]
    for chunk in chunks:
        [choice] = chunk["choices"]
        per_choice[choice["index"]].append(choice)
    joined = []
    for choices in per_choice:
        if path.endswith("chat/completions"):
            assert choices[0]["delta"] == {"role": "assistant", "content": ""}
            assert all("role" not in choice["delta"] for choice in choices[1:])
            text = "".join(choice["delta"].get("content", "") for choice in choices)
        else:
            text = "".join(choice["text"] for choice in choices)
        assert all(choice["finish_reason"] is None for choice in choices[:-1])
        joined.append((text, choices[-1]["finish_reason"], choices[-1]["stop_reason"]))
    return joined, usage["usage"], per_choice


def whole(server, path, body):
    response = server.post(path, **body).json()
    choices = response["choices"]
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]
    ends = [(choice["finish_reason"], choice["stop_reason"]) for choice in choices]
    return [(text, *end) for text, end in zip(texts, ends, strict=True)], response["usage"]


@relaxed
@given(
    ids=texts | st.lists(st.integers(0, 320), min_size=1, max_size=30),
    per_step=st.integers(1, 6),
    stops=stop_strings,
    include=st.booleans(),
    skip=st.booleans(),
    chat=st.booleans(),
    max_tokens=st.integers(1, 40),
)
def test_a_stream_joins_to_the_whole(server, ids, per_step, stops, include, skip, chat, max_tokens):
    """Texts, and ids that are none: half characters, stray bytes, control tokens."""
    tokenizer = server.tokenizer
    if isinstance(ids, str):
        ids = tokenizer.encode(ids, add_special_tokens=False)
    ids = [i for i in ids if i != tokenizer.eos_token_id] or [5]
    server.script = lambda _: [*ids, tokenizer.eos_token_id]
    server.engine.tokens_per_step = per_step
    path = "/v1/chat/completions" if chat and tokenizer.chat_template else "/v1/completions"
    start = {"messages": [{"role": "user", "content": "x"}]} if path.endswith("chat/completions") else {"prompt": "x"}
    body = start | {"stop": stops, "include_stop_str_in_output": include, "skip_special_tokens": skip}
    body |= {"max_tokens": max_tokens}
    joined, usage, [choices] = streamed(server, path, body, 1)
    assert (joined, usage) == whole(server, path, body)
    [(text, finish_reason, stop_reason)] = joined
    # The oracle: one decoding of all tokens behind the prompt, one search in all of the text.
    before = server.engine.added[-1].prompt_token_ids
    shown = [*ids, *([tokenizer.eos_token_id] if include else [])][:max_tokens]
    all_text = tokenizer.decode([*before, *shown], skip)[len(tokenizer.decode(before, skip)) :]
    found = [(all_text.find(stop) + len(stop), all_text.find(stop), stop) for stop in stops if stop in all_text]
    if found:
        end, begin, stop = min(found)
        assert (text, finish_reason, stop_reason) == (all_text[: end if include else begin], "stop", stop)
    else:
        reason = "stop" if max_tokens > len(ids) else "length"
        assert (text, finish_reason, stop_reason) == (all_text, reason, None)
        assert usage["completion_tokens"] == min(max_tokens, len(ids) + 1)
    # One token a chunk, behind what begins the stream.
    assert len(choices) == usage["completion_tokens"] + path.endswith("chat/completions")


@relaxed
@given(texts=st.lists(texts, min_size=1, max_size=3), per_step=st.integers(1, 4), n=st.integers(1, 3))
def test_streams_of_several_choices(server, texts, per_step, n):
    tokenizer = server.tokenizer

    def script(request):
        prompt, _, sequence = request.request_id.rpartition("-")[2].partition("#")
        text = f"{prompt}.{sequence or 0}: {texts[int(prompt)]}"
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    server.script, server.engine.tokens_per_step = script, per_step
    body = {"prompt": ["x"] * len(texts), "n": n, "max_tokens": 100, "logprobs": 0, "return_token_ids": True}
    joined, usage, choices = streamed(server, "/v1/completions", body, len(texts) * n)
    assert (joined, usage) == whole(server, "/v1/completions", body)
    for index, (text, *_) in enumerate(joined):
        assert text.strip() == f"{index // n}.{index % n}: {texts[index // n]}".strip()
        shown = [token for choice in choices[index][1:] for token in choice["token_ids"]]
        entries = [len(choice["logprobs"]["tokens"]) for choice in choices[index][1:]]
        assert entries == [1] * len(shown)


@relaxed
@given(prompt=texts.filter(str.strip), text=texts, skip=st.booleans(), as_ids=st.booleans())
def test_offsets_are_places_in_the_text(server, prompt, text, skip, as_ids):
    """A token that begins a character begins where the text of all tokens before it ends."""
    tokenizer = server.tokenizer
    ids = tokenizer.encode(prompt)
    output = tokenizer.encode(text, add_special_tokens=False) or [5]
    server.script = lambda _: [*output, tokenizer.eos_token_id]
    body = {"prompt": ids if as_ids else prompt, "echo": True, "logprobs": 0, "max_tokens": 100}
    [choice] = server.post("/v1/completions", skip_special_tokens=skip, **body).json()["choices"]
    offsets = choice["logprobs"]["text_offset"]
    assert len(offsets) == len(ids) + len(output) + 1 and offsets == sorted(offsets)
    with_bos = skip or not as_ids  # then the bos_token is left out of the echo
    for i, offset in enumerate(offsets[: len(ids) + len(output)]):
        before = tokenizer.decode([*ids, *output][:i], skip_special_tokens=with_bos)
        if "\ufffd" not in before:
            assert offset == len(before), (i, choice["text"], offsets)
