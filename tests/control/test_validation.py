"""Values of the wrong type are refused before they reach the engine, where they would take every request with them."""

import dataclasses

import pytest

from jaxkv.control.validation import checked_request, checked_sampling
from jaxkv.core.errors import RequestError
from jaxkv.core.request import Request, SamplingParams, StructuredOutputs
from jaxkv.core.unseen_tokens import UnseenTokens

LIMITS = {"vocab_size": 100, "max_model_len": 64, "max_logprobs": 5}
WRONG = {
    "max_tokens": [1.5, "3", True], "temperature": ["x", None, True], "top_p": ["1", None], "top_k": [1.0, None],
    "min_p": ["0"], "seed": [1.5, "s", False], "stop": ["text", (1,), None], "stop_token_ids": [(1.5,), 3, ("a",)],
    "include_stop_str_in_output": [1], "ignore_eos": [None, 0], "min_tokens": [0.5, None], "logprobs": [True, 2.0],
    "skip_special_tokens": ["yes"], "n": [0, -1, 1.5, None, True], "repetition_penalty": [None, "1"],
    "presence_penalty": [True], "frequency_penalty": ["0"],
    "logit_bias": [3, None, (1, 2), ((1, "2"),), {"1": 2.0}, {1: True}, ((1, 2, 3),)], "prompt_logprobs": [True, 1.0],
    "allowed_token_ids": [3, (1.5,), "ab"], "bad_words": ["text", (1,), None], "structured_outputs": [{}, "json", True],
}  # fmt: skip


def test_every_field_is_covered():
    assert WRONG.keys() == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_types_are_refused_by_name(name, value):
    with pytest.raises(RequestError, match=name) as error:
        checked_sampling(dataclasses.replace(SamplingParams(), **{name: value}), (1, 2), **LIMITS)
    assert error.value.param == name


@pytest.mark.parametrize("temperature, used", [(1.2e-38, 0.0), (9e-6, 0.0), (1e-5, 1e-5), (0.7, 0.7), (0, 0)])
def test_temperatures_that_would_overflow_are_greedy(temperature, used):
    assert checked_sampling(SamplingParams(temperature=temperature), (1,), **LIMITS).temperature == used


def test_right_types_pass():
    params = SamplingParams(temperature=1, top_p=1, stop=("a",), stop_token_ids=[3], logprobs=None, max_tokens=None)
    assert checked_sampling(params, (1, 2), **LIMITS).temperature == 1


def test_logit_bias_is_a_mapping_or_pairs_and_leaves_as_pairs():
    for bias in ({5: 1, 99: -100.0}, ((5, 1), (99, -100.0)), [[5, 1], [99, -100.0]]):
        checked = checked_sampling(SamplingParams(logit_bias=bias), (1,), **LIMITS)
        assert checked.logit_bias == ((5, 1), (99, -100.0)) and hash(checked)


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("n", 1025, "1 to 1024"),
        ("temperature", 10**400, "a number"),
        ("presence_penalty", -(10**400), "a number"),
        ("allowed_token_ids", (100,), "ids of this model are 0 to 99"),
        ("allowed_token_ids", (), "at least one"),
        ("bad_words", ("",), "1 to 1024 characters"),
        ("bad_words", ("  ",), "not all of them spaces"),
        ("bad_words", ("x",) * 1001, "at most 1000"),
        ("structured_outputs", StructuredOutputs(), "sets nothing"),
        ("structured_outputs", StructuredOutputs(json_object=False), "sets nothing"),
        ("structured_outputs", StructuredOutputs(regex="a", choice=("b",)), "sets regex, choice"),
        ("structured_outputs", StructuredOutputs(regex=7), "regex is a int; it must be a text"),
        ("structured_outputs", StructuredOutputs(json=7), "json is a int; it must be a JSON Schema"),
        ("structured_outputs", StructuredOutputs(choice=()), "at least one text"),
        ("structured_outputs", StructuredOutputs(choice=("a", "")), "none may be empty"),
        ("repetition_penalty", 0.0, "0.01 to 100"),
        ("repetition_penalty", float("nan"), "nan"),
        ("presence_penalty", 2.01, "-2 to 2"),
        ("frequency_penalty", -2.01, "-2 to 2"),
        ("logit_bias", {100: 1.0}, "ids of this model are 0 to 99"),
        ("logit_bias", {5: float("nan")}, "-100 to 100"),
        ("logit_bias", ((5, 1.0), (5, 2.0)), "twice"),
        ("prompt_logprobs", 6, "6 prompt_logprobs asked for; 0 to 5"),
        ("prompt_logprobs", -1, "0 to 5"),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, value, words):
    with pytest.raises(RequestError, match=words) as error:
        checked_sampling(dataclasses.replace(SamplingParams(), **{name: value}), (1, 2), **LIMITS)
    assert error.value.param == name


GOOD = Request("a", (1, 2), SamplingParams())


@pytest.mark.parametrize(
    "name, value",
    [
        ("request_id", 3), ("prompt_token_ids", [1, 2]), ("prompt_token_ids", (1.0,)), ("prompt_token_ids", (True,)),
        ("sampling", None), ("arrival_time", float("nan")), ("arrival_time", "now"), ("priority", 1.5),
        ("priority", None), ("cache_salt", 7),
    ],
)  # fmt: skip
def test_fields_of_a_request_are_checked_by_type(name, value):
    assert checked_request(GOOD, **LIMITS) == GOOD
    with pytest.raises(RequestError, match=f"^{name} is") as error:
        checked_request(dataclasses.replace(GOOD, **{name: value}), **LIMITS)
    assert error.value.param == name


def test_unseen_tokens_are_for_simulations_alone():
    """No server can be made to compute a prompt that nobody knows, nor to share blocks by names that a caller made up."""
    unseen = Request("a", UnseenTokens(20), SamplingParams(), block_names=(b"x",))
    assert checked_request(unseen, **LIMITS, unseen_tokens=True).block_names == (b"x",)
    with pytest.raises(RequestError) as refused:
        checked_request(unseen, **LIMITS)
    assert refused.value.param == "prompt_token_ids"
    for allowed in (False, True):
        with pytest.raises(RequestError) as refused:
            checked_request(Request("a", (1, 2), SamplingParams(), block_names=(b"x",)), **LIMITS, unseen_tokens=allowed)
        assert refused.value.param == "block_names"
    with pytest.raises(RequestError, match="maximum context length is 64"):
        checked_request(Request("a", UnseenTokens(64), SamplingParams()), **LIMITS, unseen_tokens=True)
