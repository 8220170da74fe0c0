"""Tools: what the template gets, what is found in the output, whole and streamed, and what is forced."""

import json
import pathlib
import re
import runpy

import pytest

from jaxkv.constraints.compiler import ConstraintCompiler
from jaxkv.core.errors import RequestError
from jaxkv.core.request import SamplingParams, StructuredOutputs
from jaxkv.core.token_constraint import allows
from jaxkv.server.tools import ToolCallParser, ToolFormat, ToolUse, checked_tools, tool_format
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
CALL = {"name": "get_weather", "arguments": {"city": "Zürich"}}
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


def parsed(name, text, size, parallel=True):
    parser = ToolCallParser(ToolUse(FORMATS[name], TOOLS, (), parallel))
    said, calls = "", []
    for start in range(0, len(text), size):
        more, found = parser.feed(text[start : start + size])
        said, calls = said + more, calls + found
    more, found = parser.end()
    return said + more, [
        (c["index"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls + found
    ]


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
        ("mistral", "[TOOL_CALLS] what"), ("mistral", "[TOOL_CALLS"), ("mistral", "[TOOL_CALLS] []"),
        ("llama", '{"city": "Bern"}'), ("llama", "{"), ("llama", ' said {"name": "now"}'), ("llama", "\n\n"),
        ("hermes", "<tool_call>" + "[" * 5000 + "</tool_call>"),
    ],
)  # fmt: skip
def test_what_is_no_call_is_text_and_none_of_it_is_lost(name, text, size):
    assert parsed(name, text, size) == (text, [])


@pytest.mark.parametrize("name, template", [("hermes", HERMES), ("mistral", MISTRAL), ("llama", LLAMA)])
def test_the_format_comes_from_the_template(name, template):
    assert tool_format(SMALL["byte_level"](template)) == FORMATS[name]
    assert tool_format(SMALL["byte_level"]()) is None and tool_format(SMALL["byte_level"](None)) is None


@pytest.mark.parametrize("forced", [("get_weather",), ("get_weather", "now")])
@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_are_the_models_own_form(name, forced):
    """Of the texts that the grammar lets through, exactly those that call one of them."""
    tokenizer = SMALL["byte_level"]()
    compiler = ConstraintCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    grammar = ToolUse(FORMATS[name], TOOLS, forced, parallel=True).grammar()
    constraint = compiler.compile(SamplingParams(structured_outputs=StructuredOutputs(grammar=grammar)))

    def takes(text):
        state = constraint.copy()
        for token in [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]:
            if not allows(state.mask(), token):
                return False
            state.accept((token,))
        return True

    now = {"name": "now", "arguments": {}}
    assert takes(written(name, CALL).replace("[TOOL_CALLS] ", "[TOOL_CALLS]"))
    assert takes(written(name, now).replace("[TOOL_CALLS] ", "[TOOL_CALLS]")) == ("now" in forced)
    assert not takes("It is sunny.") and not takes(written(name, {"name": "other", "arguments": {}}))
    assert not takes(written(name, {"name": "get_weather", "arguments": {"city": "too long a name"}}))


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
    assert response.status_code == 400 and response.json()["error"]["param"] == "messages"


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
        ({"tools": [{"type": "function"}]}, "tools", "a tool must be"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "'a b'"),
        ({"tools": [TIME, TIME]}, "tools", "two functions"),
        ({"tools": [TIME] * 129}, "tools", "129 entries"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 7}}]}, "tools", "JSON Schema"),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice", "leave one out",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "odd"}}}],
            },
            "tools", "tools.grammar cannot be compiled",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named(tool_server, body, param, message):
    response = ask(tool_server, **body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and message in error["message"]


def test_a_model_without_tools_says_so(server):
    response = ask(server)
    assert response.status_code == 400 and "takes no tools" in response.json()["error"]["message"]
    assert ask(server, tool_choice="none").status_code == 200
    with pytest.raises(RequestError, match="takes no tools"):
        checked_tools(TOOLS, "auto", True, None)
