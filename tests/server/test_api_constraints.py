"""response_format, structured_outputs, allowed_token_ids and bad_words: from the body to the engine."""

import pytest

from jaxkv.core.request import StructuredOutputs
from jaxkv.core.token_constraint import allows

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def ask(server, path="/v1/chat/completions", **body):
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    return server.post(path, max_tokens=50, **prompt, **body)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "body, wanted",
    [
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
            StructuredOutputs(json=SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json=SCHEMA)),
        ({"structured_outputs": {"json": '{"type": "array"}', "regex": None}}, StructuredOutputs(json='{"type": "array"}')),
        ({"structured_outputs": {"regex": "[a-c]+"}}, StructuredOutputs(regex="[a-c]+")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, StructuredOutputs(choice=("yes", "no"))),
        ({"structured_outputs": {"grammar": 'start: "a"+'}}, StructuredOutputs(grammar='start: "a"+')),
        ({"structured_outputs": {"json": True}}, StructuredOutputs(json=True)),
        ({"structured_outputs": {"json_object": True}}, StructuredOutputs(json_object=True)),
        ({"response_format": {"type": "text"}, "structured_outputs": None}, None),
    ],
)  # fmt: skip
def test_what_is_asked_reaches_the_engine(server, path, body, wanted):
    assert ask(server, path, **body).status_code == 200
    sent = server.engine.added[-1]
    assert sent.sampling.structured_outputs == wanted and (sent.constraint is None) == (wanted is None)


def test_lists_of_tokens_reach_the_engine(server):
    assert ask(server, allowed_token_ids=[5, 9], bad_words=[]).status_code == 200
    sent = server.engine.added[-1]
    assert sent.sampling.allowed_token_ids == (5, 9) and sent.constraint.is_fixed
    assert [i for i in range(300) if allows(sent.constraint.mask(), i)] == [5, 9]
    assert ask(server, allowed_token_ids=None, bad_words=["fox"]).status_code == 200
    assert server.engine.added[-1].sampling.bad_words == ("fox",)


def test_all_prompts_of_a_body_have_one_grammar(server):
    assert server.post("/v1/completions", prompt=["a", "b"], n=2, structured_outputs={"regex": "x"}).status_code == 200
    assert len({id(request.constraint) for request in server.engine.added[-4:]}) == 1


@pytest.mark.parametrize(
    "body, param, message",
    [
        ({"response_format": {"type": "xml"}}, "response_format", "'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "odd"}}}},
         "response_format", "response_format.json_schema.schema cannot be compiled"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "sets regex, choice"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "structured_outputs.regex cannot be compiled"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least one text"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs", "none may be empty"),
        ({"structured_outputs": {"regex": "a" * 10_001}}, "structured_outputs", "10001 characters; at most 10000"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural_tag is not supported"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
         "structured_outputs", "leave one out"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids", "ids of this model"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
        ({"structured_outputs": {"json": False}}, "structured_outputs", "no text"),
        ({"structured_outputs": {"json": {"type": "integer", "multipleOf": 99999989}}}, "structured_outputs", "too much"),
        ({"bad_words": [" "]}, "bad_words", "not all of them spaces"),
        ({"bad_words": ["x"] * 1001}, "bad_words", "1001 entries"),
    ],
)  # fmt: skip
def test_mistakes_are_named(server, body, param, message):
    response = ask(server, **body)
    error = response.json()["error"]
    assert response.status_code == 400 and message in error["message"], error
    assert error["param"] == param


def test_a_request_that_cannot_go_on_ends_alone(serve):
    """The engine ends one request with an error: the client hears it, the server is well."""
    server = serve()
    server.engine.dead_ends = 3
    response = ask(server, structured_outputs={"regex": "[a-z ]*"})
    assert response.status_code == 400 and "too complex" in response.json()["error"]["message"]
    streamed = ask(server, stream=True, structured_outputs={"regex": "[a-z ]*"})
    assert streamed.status_code == 200 and 'data: {"error"' in streamed.text
    server.engine.dead_ends = None
    assert ask(server).status_code == 200 and server.http.get("/health").status_code == 200
