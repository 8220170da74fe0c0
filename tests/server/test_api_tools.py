"""Tools over HTTP: what the template gets, calls in answers and streams, what is forced, and mistakes."""

import json
import pathlib
import re
import runpy

import pytest

from jaxkv.constraints.compiler import ConstraintCompiler
from jaxkv.core.errors import RequestError
from jaxkv.core.request import SamplingParams, StructuredOutputs
from jaxkv.core.token_constraint import allows
from jaxkv.server.tool_parser import ToolCallParser
from jaxkv.server.tools import ToolUse, checked_tools, tool_format
from jaxkv.tokenization.tokenizer import Tokenizer
from tests.support.tool_formats import (
    CALL,
    FORMATS,
    HERMES,
    IDS_BEHIND_NAMES,
    LLAMA,
    MISTRAL,
    TEMPLATES,
    TIME,
    TOOLS,
    written,
)

SMALL = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "small_tokenizers.py"))
SHORT = {"type": "function", "function": {"name": "get_weather"}}  # the servers here have a context of 256 tokens
# Where tools are many or long, which the small context does not hold.
HERMES_BRIEFLY, LLAMA_BRIEFLY = (text.replace("tools | tojson", "tools | length") for text in (HERMES, LLAMA))


def function(name, **more):
    return {"type": "function", "function": {"name": name, **more}}


BROKEN = function("broken", parameters={"type": "object", "properties": {"a": {"type": "odd"}}})
TIME_AGAIN = function("again")


@pytest.mark.parametrize("name, template", TEMPLATES.items())
def test_the_format_comes_from_the_template(name, template):
    assert tool_format(SMALL["byte_level"](template)) == FORMATS[name]
    assert tool_format(SMALL["byte_level"]()) is None and tool_format(SMALL["byte_level"](None)) is None


def lets_through(constraint, tokenizer, text):
    state = constraint.copy()
    for token in [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]:
        if not allows(state.mask(), token):
            return False
        state.accept((token,))
    return True


@pytest.mark.parametrize("forced", [("get_weather",), ("get_weather", "now")])
@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_are_the_models_own_form(name, forced):
    """Of the texts that the grammar lets through, exactly those that call one of them."""
    tokenizer = SMALL["byte_level"]()
    compiler = ConstraintCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    grammar = ToolUse(FORMATS[name], TOOLS, forced, parallel=True).grammar()
    constraint = compiler.compile(SamplingParams(structured_outputs=StructuredOutputs(grammar=grammar)))

    def takes(text):
        return lets_through(constraint, tokenizer, text)

    now = {"name": "now", "arguments": {}}
    assert takes(written(name, CALL).replace("[TOOL_CALLS] ", "[TOOL_CALLS]"))
    assert takes(written(name, now).replace("[TOOL_CALLS] ", "[TOOL_CALLS]")) == ("now" in forced)
    assert not takes("It is sunny.") and not takes(written(name, {"name": "other", "arguments": {}}))
    assert not takes(written(name, {"name": "get_weather", "arguments": {"city": "too long a name"}}))


@pytest.mark.parametrize(
    "parameters, arguments, takes",
    [
        *[(nothing, "{}", True) for nothing in ({}, None, "absent")],
        *[(nothing, '{"a": 1}', False) for nothing in ({}, None, "absent")],
        ({"type": "object"}, '{"a": 1}', True), ({"type": ["null", "object"]}, "null", False),
        ({"anyOf": [{"type": "string"}, {"required": ["a"]}]}, '{"a": 1}', True),
        ({"anyOf": [{"type": "string"}, {"required": ["a"]}]}, '"a"', False),
        ({"title": "anything"}, "7", False), ({"title": "anything"}, "{}", True),
    ],
)  # fmt: skip
def test_forced_arguments_are_an_object_and_an_empty_one_without_parameters(serve, parameters, arguments, takes):
    server = serve(SMALL["byte_level"](LLAMA_BRIEFLY))
    given = {} if parameters == "absent" else {"parameters": parameters}
    tools = [{"type": "function", "function": {"name": "f", **given}}]
    assert ask(server, tools=tools, tool_choice="required").status_code == 200
    text = f'{{"name": "f", "parameters": {arguments}}}'
    assert lets_through(server.engine.added[-1].constraint, server.tokenizer, text) == takes


def test_a_named_function_is_called_once_and_required_ones_as_often_as_the_model_wants(serve):
    server = serve(SMALL["byte_level"](HERMES))
    named = {"type": "function", "function": {"name": "now"}}
    for choice, parallel, often in [
        (named, None, False), (named, True, False), ("required", None, True), ("required", False, False)
    ]:  # fmt: skip
        assert ask(server, tools=[TIME], tool_choice=choice, parallel_tool_calls=parallel).status_code == 200
        constraint = server.engine.added[-1].constraint
        once = written("hermes", {"name": "now", "arguments": {}})
        assert lets_through(constraint, server.tokenizer, once)
        assert lets_through(constraint, server.tokenizer, f"{once}\n{once}") == often


def test_a_whole_call_before_one_that_max_tokens_cuts_comes_out(serve):
    now = {"name": "now", "arguments": {}}
    for template, name in ((HERMES, "hermes"), (MISTRAL, "mistral"), (LLAMA, "llama")):
        server = serve(SMALL["byte_level"](template), text=written(name, now, now))
        size = len(server.tokenizer.encode(written(name, now, now), add_special_tokens=False)) - 25
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": [TIME], "max_tokens": size}
        choice = server.post("/v1/chat/completions", tool_choice="required", **body).json()["choices"][0]
        assert choice["finish_reason"] == "length" and '{"name"' in choice["message"]["content"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]


def test_each_form_of_mistrals_is_forced_alone():
    """A model that was trained on one has never written the others."""
    tokenizer = SMALL["byte_level"]()
    compiler = ConstraintCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    forms = [name for name in FORMATS if name.startswith("mistral")]
    texts = {name: written(name, CALL).replace("[TOOL_CALLS] ", "[TOOL_CALLS]") for name in forms}
    twice = {name: written(name, CALL, CALL).replace("[TOOL_CALLS] ", "[TOOL_CALLS]") for name in forms}
    for name in forms:
        for parallel in (True, False):
            grammar = ToolUse(FORMATS[name], TOOLS, ("get_weather",), parallel).grammar()
            constraint = compiler.compile(SamplingParams(structured_outputs=StructuredOutputs(grammar=grammar)))
            assert [other for other in forms if lets_through(constraint, tokenizer, texts[other])] == [name]
            assert lets_through(constraint, tokenizer, twice[name]) == parallel


def test_tags_behind_names_are_forced_as_tokens():
    """And a call that is forced so is found in what is written."""
    fast = SMALL["byte_level_fast"]()
    tags = ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"]
    fast.add_special_tokens(tags)
    tokenizer = Tokenizer(fast, special_tokens={"eos_token": "<|im_end|>"}, chat_template=IDS_BEHIND_NAMES)
    form = tool_format(tokenizer)
    assert form.control_ids == {tag: fast.token_to_id(tag) for tag in tags}
    compiler = ConstraintCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    grammar = ToolUse(form, TOOLS, ("now",), parallel=False).grammar()
    constraint = compiler.compile(SamplingParams(structured_outputs=StructuredOutputs(grammar=grammar)))
    ids = tokenizer.encode("[TOOL_CALLS]now[CALL_ID]abcdefgh9[ARGS]{}", add_special_tokens=False)
    assert [i for i in ids if i in form.control_ids.values()] == list(form.control_ids.values())
    state = constraint.copy()
    for token in [*ids, tokenizer.eos_token_id]:
        assert allows(state.mask(), token), tokenizer.token_text(token)
        state.accept((token,))
    parser = ToolCallParser(ToolUse(form, TOOLS, ("now",), parallel=False))
    _, (call,) = parser.feed(tokenizer.decode(ids, False))
    assert call["function"] == {"name": "now", "arguments": "{}"}


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("mistral")])
def test_ids_are_such_as_mistrals_templates_take_back(serve, name):
    """They raise for any other length than 9."""
    template = (
        TEMPLATES[name]
        .replace("tools | tojson", "tools | length")
        .replace(
            "called for",
            "{% if c.id|length != 9 or not c.id.isalnum() %}{{ raise_exception('ids have 9 letters') }}{% endif %}called for",
        )
    )
    server = serve(SMALL["byte_level"](template), text=written(name, CALL))
    message = ask(server).json()["choices"][0]["message"]
    result = {"role": "tool", "content": "sunny", "tool_call_id": message["tool_calls"][0]["id"]}
    again = ask(server, messages=[{"role": "user", "content": "hi"}, message, result])
    assert again.status_code == 200, again.text
    assert "called for Zürich" in prompt_of(server)


def test_tags_that_are_control_tokens_are_forced_as_tokens():
    """Their text would spell something else, which the model never wrote."""
    fast = SMALL["byte_level_fast"]()
    fast.add_special_tokens(["<tool_call>", "</tool_call>"])
    tokenizer = Tokenizer(fast, special_tokens={"eos_token": "<|im_end|>"}, chat_template=HERMES)
    form = tool_format(tokenizer)
    opening = fast.token_to_id("<tool_call>")
    assert form.control_ids == {"<tool_call>": opening, "</tool_call>": opening + 1}
    compiler = ConstraintCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    grammar = ToolUse(form, TOOLS, ("now",), parallel=False).grammar()
    state = compiler.compile(SamplingParams(structured_outputs=StructuredOutputs(grammar=grammar))).copy()
    assert [i for i in range(tokenizer.vocab_size) if allows(state.mask(), i)] == [opening]
    body = tokenizer.encode('\n{"name": "now", "arguments": {}}\n', add_special_tokens=False)
    for token in [opening, *body, opening + 1, tokenizer.eos_token_id]:
        assert allows(state.mask(), token), tokenizer.token_text(token)
        state.accept((token,))


@pytest.fixture
def tool_server(serve):
    return serve(SMALL["byte_level"](HERMES), text=f"I look. {written('hermes', CALL)}")


def ask(server, stream=False, **body):
    messages = body.pop("messages", [{"role": "user", "content": "hi"}])
    return server.post(
        "/v1/chat/completions", messages=messages, max_tokens=100, stream=stream, **({"tools": [SHORT]} | body)
    )


def prompt_of(server):
    return server.tokenizer.decode(server.engine.added[-1].prompt_token_ids, False)


def test_a_call_in_an_answer(tool_server):
    choice = ask(tool_server).json()["choices"][0]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "I look. ", "refusal": None}
    assert choice["finish_reason"] == "tool_calls" and re.fullmatch("call_[0-9a-f]{24}", call.pop("id"))
    assert call == {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'}}
    assert '"get_weather"' in prompt_of(tool_server)


def test_a_call_in_a_stream(tool_server):
    lines = [line[6:] for line in ask(tool_server, stream=True).text.split("\n") if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert "".join(c["delta"].get("content", "") for c in choices) == "I look. "
    (call,) = [call for c in choices for call in c["delta"].get("tool_calls", ())]
    assert (call["index"], call["function"]["name"]) == (0, "get_weather")
    assert json.loads(call["function"]["arguments"]) == CALL["arguments"]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["tool_calls"]


def test_none_shows_no_tools_and_looks_for_no_call(tool_server):
    choice = ask(tool_server, tool_choice="none").json()["choices"][0]
    assert "<tool_call>" in choice["message"]["content"] and "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop" and "get_weather" not in prompt_of(tool_server)


def test_earlier_calls_and_results_reach_the_template(tool_server):
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    assert ask(tool_server, messages=messages).status_code == 200
    assert "called for Bern" in prompt_of(tool_server) and "sunny" in prompt_of(tool_server)
    call["function"]["arguments"] = "{broken"
    response = ask(tool_server, messages=messages)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_is_a_constraint(tool_server, choice):
    assert ask(tool_server, tool_choice=choice).status_code == 200
    sent = tool_server.engine.added[-1]
    assert "get_weather" in sent.sampling.structured_outputs.grammar and sent.constraint is not None


@pytest.mark.parametrize(
    "body, param, message",
    [
        ({"tool_choice": "always"}, "tool_choice", "required"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "tools has get_weather"),
        ({"tool_choice": "required", "tools": None}, "tool_choice", "needs tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "must be an object"),
        ({"tools": [TIME, {"function": {"name": "a"}}]}, "tools[1].type", 'must be "function"'),
        ({"tools": [{"type": "custom", "function": {"name": "a"}}]}, "tools[0].type", 'must be "function"'),
        ({"tools": [function("a b")]}, "tools[0].function.name", "'a b'"),
        ({"tools": [function("a", description=7)]}, "tools[0].function.description", "must be a string"),
        ({"tools": [TIME, TIME]}, "tools", "two functions"),
        ({"tools": [TIME] * 129}, "tools", "129 entries"),
        ({"tools": [function("a", parameters=7)]}, "tools[0].function.parameters", "JSON Schema"),
        ({"tools": [TIME, function("a", parameters={"type": "string"})]},
         "tools[1].function.parameters", "has the type 'string'"),
        ({"tools": [function("a", parameters={"type": ["null"]})]}, "tools[0].function.parameters", "has the type"),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice", "leave one out",
        ),
        ({"tool_choice": "required", "tools": [TIME, BROKEN, TIME_AGAIN]},
         "tools[1].function.parameters", "tools[1].function.parameters cannot be compiled: failed to compile"),
        ({"tool_choice": {"type": "function", "function": {"name": "broken"}}, "tools": [TIME, BROKEN]},
         "tools[1].function.parameters", "tools[1].function.parameters cannot be compiled: failed to compile"),
        ({"tool_choice": "required", "tools": [TIME, function("a", parameters={"enum": ["no object"]})]},
         "tools[1].function.parameters", "Unsatisfiable"),
        ({"tool_choice": "required", "tools": [TIME, function("a", parameters={"title": "x" * 100_000})]},
         "tools", "tools is not valid"),
    ],
)  # fmt: skip
def test_mistakes_are_named(serve, body, param, message):
    response = ask(serve(SMALL["byte_level"](HERMES_BRIEFLY)), **body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and message in error["message"]
    assert "structured_outputs" not in error["message"] or "response_format" in error["message"]


def test_a_forced_call_that_cannot_go_on_blames_the_tools(tool_server):
    """The engine ends it under way with an error that names what it knows of."""
    tool_server.engine.dead_ends = 3
    response = ask(tool_server, tool_choice="required")
    streamed = ask(tool_server, tool_choice="required", stream=True).text
    (told,) = [line[6:] for line in streamed.split("\n") if line.startswith('data: {"error"')]
    for error in (response.json()["error"], json.loads(told)["error"]):
        assert error["param"] == "tools[0].function.parameters" and "structured_outputs" not in error["message"]


def earlier(**changes):
    """A message with a call, as clients send it."""
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}} | changes
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    "message, field",
    [
        ({"role": "robot", "content": "a"}, "role"), ({"role": "", "content": "a"}, "role"),
        ({"role": "function", "name": "f", "content": "a"}, "role"),
        ({"role": "tool", "content": "a"}, "tool_call_id"), ({"role": "tool", "content": "a", "tool_call_id": 7}, "tool_call_id"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "content"),
        *[({"role": "assistant", "tool_calls": calls}, "tool_calls") for calls in ("a", {}, 0, {"id": "1"})],
        ({"role": "assistant", "tool_calls": ["a"]}, "tool_calls[0]"),
        (earlier(id=None), "tool_calls[0].id"), (earlier(id=1), "tool_calls[0].id"),
        (earlier(type=None), "tool_calls[0].type"), (earlier(type="custom"), "tool_calls[0].type"),
        (earlier(function="f"), "tool_calls[0].function"),
        (earlier(function={"arguments": "{}"}), "tool_calls[0].function.name"),
        *[
            (earlier(function={"name": "f", "arguments": arguments}), "tool_calls[0].function.arguments")
            for arguments in ("{broken", '{"a": NaN}', {"a": float("nan")}, [1], 7, None, "[" * 100_000)
        ],
    ],
)  # fmt: skip
def test_mistakes_in_messages_are_named(tool_server, message, field):
    messages = [{"role": "user", "content": "hi"}, message]
    for path, more in (("/v1/chat/completions", {"tools": [SHORT]}), ("/tokenize", {})):
        body = json.dumps({"messages": messages, **more})  # httpx itself refuses NaN
        error = tool_server.http.post(path, content=body, headers={"content-type": "application/json"}).json()["error"]
        assert (error["code"], error["param"]) == (400, f"messages[1].{field}"), error
        assert f"messages[1].{field}" in error["message"]


def test_messages_of_real_clients_are_taken(tool_server):
    messages = [
        {"role": "system", "content": "a"}, {"role": "developer", "content": "a"}, {"role": "user", "content": "a"},
        earlier(), earlier(function={"name": "f", "arguments": {"city": "Bern"}}),
        earlier(function={"name": "f", "arguments": ""}), {"role": "assistant", "content": "a", "tool_calls": None},
        {"role": "assistant", "content": "a", "tool_calls": []}, {"role": "tool", "content": "a", "tool_call_id": "1"},
    ]  # fmt: skip
    assert tool_server.post("/tokenize", messages=messages, tools=TOOLS).status_code == 200
    broken = tool_server.post("/tokenize", messages=messages, tools=[{"function": {}}]).json()["error"]
    assert broken["param"] == "tools[0].type"


def test_a_model_without_tools_says_so(server):
    response = ask(server)
    assert response.status_code == 400 and "takes no tools" in response.json()["error"]["message"]
    assert ask(server, tool_choice="none").status_code == 200
    with pytest.raises(RequestError, match="takes no tools"):
        checked_tools(TOOLS, "auto", True, None)
