"""Tools: what the template gets, what is found in the output, whole and streamed, and what is forced."""

import json
import pathlib
import re
import runpy
import time

import hypothesis
import pytest
from hypothesis import strategies

from jaxkv.constraints.compiler import ConstraintCompiler
from jaxkv.core.errors import RequestError
from jaxkv.core.request import SamplingParams, StructuredOutputs
from jaxkv.core.token_constraint import allows
from jaxkv.server.tool_parser import ToolCallParser
from jaxkv.server.tools import ToolFormat, ToolUse, checked_tools, tool_format
from jaxkv.tokenization.tokenizer import Tokenizer

SMALL = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "small_tokenizers.py"))
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"type": "string", "maxLength": 6}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, TIME]
SHORT = {"type": "function", "function": {"name": "get_weather"}}  # the servers here have a context of 256 tokens
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}called for {{ c.function.arguments.city }}{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
HERMES = "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}" + TURNS
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }} [TOOL_CALLS]{% endif %}" + TURNS
LLAMA = '{% if tools %}{"name": function name, "parameters": {}}{{ tools | tojson }}{% endif %}' + TURNS
# Where tools are many or long, which the small context does not hold.
HERMES_BRIEFLY, LLAMA_BRIEFLY = (text.replace("tools | tojson", "tools | length") for text in (HERMES, LLAMA))
CALL = {"name": "get_weather", "arguments": {"city": "Zürich"}}


def function(name, **more):
    return {"type": "function", "function": {"name": name, **more}}


BROKEN = function("broken", parameters={"type": "object", "properties": {"a": {"type": "odd"}}})
TIME_AGAIN = function("again")
FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>"),
    "mistral": ToolFormat("[TOOL_CALLS]", "", as_list=True),
    "llama": ToolFormat("", "", arguments="parameters"),
}


def written(name, *calls):
    """Calls as a model of that family writes them."""
    if name == "hermes":
        return "\n".join(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls)
    if name == "mistral":
        return f"[TOOL_CALLS] {json.dumps(calls, ensure_ascii=False)}"
    return "; ".join(
        json.dumps({"name": call["name"], "parameters": call["arguments"]}, ensure_ascii=False) for call in calls
    )


def parsed_parts(name, parts, parallel=True):
    """What is said, and calls: their places, names and arguments as written."""
    parser = ToolCallParser(ToolUse(FORMATS[name], TOOLS, (), parallel))
    said, calls = "", []
    for more, found in [*map(parser.feed, parts), parser.end()]:
        said, calls = said + more, calls + found
    assert parser.num_calls == len(calls)
    return said, [(c["index"], c["function"]["name"], c["function"]["arguments"]) for c in calls]


def parsed(name, text, size, parallel=True):
    said, calls = parsed_parts(name, [text[i : i + size] for i in range(0, len(text), size)], parallel)
    return said, [(index, function, json.loads(arguments)) for index, function, arguments in calls]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_found_however_the_text_is_cut(name, size):
    other = {"name": "now", "arguments": {}}
    assert parsed(name, written(name, CALL, other), size) == (
        "", [(0, "get_weather", CALL["arguments"]), (1, "now", {})],
    )  # fmt: skip
    assert parsed(name, written(name, CALL, other), size, parallel=False)[1] == [(0, "get_weather", CALL["arguments"])]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_text_before_a_call_is_said(name, size):
    assert parsed(name, f"I look. {written(name, CALL)}", size) == ("I look. ", [(0, "get_weather", CALL["arguments"])])


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "name, text",
    [
        ("hermes", "a < b and <tool_cal"), ("hermes", "<tool_call>\nnot JSON\n</tool_call> and on"),
        ("hermes", '<tool_call>\n{"name": 7}\n</tool_call>'), ("hermes", '<tool_call>\n{"name": "now"'), ("hermes", ""),
        ("hermes", '<tool_call>\n{"name": "now"}\n</tool_call>'), ("mistral", '[TOOL_CALLS] [{"name": "now"}]'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"x": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}} and on'), ("hermes", "<tool_call>" + "[ " * 300),
        ("hermes", '<tool_call>{"name": "n\\ud800", "arguments": {}}</tool_call>'),
        *[("hermes", f'<tool_call>{{"name": "now", "arguments": {value}}}</tool_call>') for value in ("[]", '"a"', "null")],
        ("mistral", "[TOOL_CALLS]now"), ("mistral", "[TOOL_CALLS]now[ARGS]"), ("mistral", "[TOOL_CALLS]now[ARGS]{a}"),
        ("mistral", "[TOOL_CALLS]not now{}"), ("mistral", "[TOOL_CALLS]" + "a" * 300 + "{}"),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": 1'),
        ("llama", '{"name": "Bob", "age": 5}'), ("llama", '{"name": "now", "age": 5}'), ("llama", '{"name": "now"}'),
        ("llama", '{"name": "other", "parameters": {}}'), ("llama", '{"name": "now", "parameters": "x"}'),
        ("llama", '{"a": 1} {"name": "now", "parameters": {}}'), ("llama", '{"name": "now", "parameters": {}'),
        ("mistral", "[TOOL_CALLS] what"), ("mistral", "[TOOL_CALLS"), ("mistral", "[TOOL_CALLS] []"),
        ("llama", '{"city": "Bern"}'), ("llama", "{"), ("llama", ' said {"name": "now"}'), ("llama", "\n\n"),
        ("hermes", "<tool_call>" + "[" * 5000 + "</tool_call>"),
    ],
)  # fmt: skip
def test_what_is_no_call_is_text_and_none_of_it_is_lost(name, text, size):
    assert parsed(name, text, size) == (text, [])


@pytest.mark.parametrize("size", [1, 2, 1000])
@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_marked_calls_of_other_functions_are_passed_on(name, size):
    other = {"name": "not_among_them", "arguments": {"a": [1]}}
    assert parsed(name, written(name, other), size) == ("", [(0, "not_among_them", {"a": [1]})])


@pytest.mark.parametrize("size", [1, 2, 1000])
@pytest.mark.parametrize(
    "name, text, said",
    [
        ("hermes", "one <tool_call>{call}</tool_call> two  <tool_call>{call}</tool_call>  three", "one  two    three"),
        ("hermes", "<tool_call>{call}</tool_call> \n <tool_call> {call} </tool_call> \n", ""),
        ("hermes", "<tool_call>{call}</tool_call><tool_call>{call}</tool_call> <tool_call>{", " <tool_call>{"),
        ("hermes", "<tool_call>{call}</tool_call> <tool_call>\n{call}\n", ""),
        ("hermes", "<tool_call>{call}</tool_call> <tool_call>\n{call}\n</tool", ""),
        ("hermes", "<tool_call>\n{call}\n{call}\n</tool_call>", ""),
        ("hermes", "<tool_call>[{call}, {call}]</tool_call> so", " so"),
        ("hermes", "<tool_call>{call}</tool_call></tool_call><tool_call>{call}</tool_call>", "</tool_call>"),
        ("mistral", "[TOOL_CALLS] [{call}, {call}] so", " so"),
        ("mistral", "[TOOL_CALLS] [{call}, {call}, ", ""),
        ("mistral", '[TOOL_CALLS] [{call}, {call}, {"name": "no', ', {"name": "no'),
        ("mistral", "a [TOOL_CALLS][{call}] b [TOOL_CALLS][{call}] c", "a  b  c"),
        ("mistral", "[TOOL_CALLS]now[ARGS]{ARGUMENTS}[TOOL_CALLS]now{ARGUMENTS} c", " c"),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{ARGUMENTS}\n[TOOL_CALLS] now {ARGUMENTS}", ""),
        ("mistral", "[TOOL_CALLS] {call}; {call}", ""),
        ("llama", '{call}; {call}\n{"name": "now", "par', '\n{"name": "now", "par'),
        ("llama", "\n{call}, {call} and so", " and so"),
    ],
)  # fmt: skip
def test_calls_text_and_torn_calls_between_each_other(name, text, said, size):
    arguments = '{ "of" :0.10,"é\\u00e9":"</tool_call> [TOOL_CALLS] }\\"\\\\" , "x":[1e400]}'
    call = '{"name": "now" , "arguments" : ' + arguments + ' ,"more":{}}'
    text = text.replace("{call}", call).replace("{ARGUMENTS}", arguments)
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    assert parsed_parts(name, parts) == (said, [(0, "now", arguments), (1, "now", arguments)])
    assert parsed_parts(name, parts, parallel=False) == (said, [(0, "now", arguments)])


PIECES = strategies.sampled_from(
    [
        *[written(name, *calls) for name in FORMATS for calls in ([CALL], [CALL, CALL])],
        *[
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "now",
            "[ARGS]",
            "[CALL_ID]a1",
            "[",
            "]",
            "{",
            "}",
            "{}",
            '"',
            "\\",
        ],
        *['{"name": "now", "arguments": {}}', '{"name": "Bob"}', '{"name": "now"', "<tool", "one", ",", ";", "é", "7"],
        *[" ", "  ", "\n"] * 3,
    ]
)


@hypothesis.settings(max_examples=1000, deadline=None)
@hypothesis.given(name=strategies.sampled_from(list(FORMATS)), pieces=strategies.lists(PIECES, max_size=12),
                  parallel=strategies.booleans(), data=strategies.data())  # fmt: skip
def test_a_stream_says_and_calls_what_the_whole_does(name, pieces, parallel, data):
    text = "".join(pieces)
    cuts = sorted(data.draw(strategies.lists(strategies.integers(0, len(text)), max_size=20)))
    whole = parsed_parts(name, [text], parallel)
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed_parts(name, parts, parallel) == whole == parsed_parts(name, text, parallel)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(name=strategies.sampled_from(["hermes", "mistral"]), data=strategies.data(),
                  texts=strategies.lists(strategies.text("a <\n,", max_size=4), max_size=6))  # fmt: skip
def test_all_is_said_but_white_space_that_only_parts_calls(name, texts, data):
    calls = data.draw(strategies.integers(0, len(texts)))
    text = "".join(said + (written(name, CALL) if i < calls else "") for i, said in enumerate(texts))
    last = "".join(texts[calls:])
    parts = texts[:1] + [said for said in texts[1:calls] if said.strip()] + ([last] if last.strip() else [])
    said, found = parsed_parts(name, [text])
    assert (said, len(found)) == ("".join(parts) if calls else last, calls)


@pytest.mark.parametrize("name", FORMATS)
def test_the_time_to_find_calls_grows_as_the_text_does(name):
    long = {"name": "now", "arguments": {"x": "a{" * 20_000}}
    begin = time.process_time()
    assert len(parsed(name, written(name, long), 4)[1]) == 1
    for text in (
        "<tool_call>" * 5_000,
        '<tool_call>{"' * 5_000,
        '[TOOL_CALLS][{"name' * 5_000,
        "[TOOL_CALLS]a" * 5_000,
    ):
        assert parsed(name, text, 4) == (text, [])
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("name, template", [("hermes", HERMES), ("mistral", MISTRAL), ("llama", LLAMA)])
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
