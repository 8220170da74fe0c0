"""Requests made up from /openapi.json, valid ones and broken ones: none may get a 5xx, and mistakes get error objects."""

import collections

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

SERVED = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
    "/diagnose_prefix": {"prompt": "x"},
}


@pytest.fixture(scope="module")
def api(running, byte_level):
    with running(byte_level, tokens_per_step=8) as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
def test_no_request_gets_a_server_error(api, mode):
    seen = collections.Counter()
    for result in api.get_all_operations():
        operation = result.ok()

        @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case):
            # Made-up requests name made-up models; every second one asks for whatever there is, so that some are served.
            seen["all"] += 1
            if mode is GenerationMode.POSITIVE and seen["all"] % 2 and isinstance(case.body, dict):
                case.body.pop("model", None)
                for message in case.body.get("messages") or ():  # which the role tool needs
                    message["tool_call_id"] = "1"
            response = case.call(timeout=20)
            assert response.status_code < 500, response.text
            if response.status_code >= 400 and case.method != "HEAD":
                error = response.json()["error"]
                assert set(error) == {"message", "type", "param", "code"} and error["code"] == response.status_code
                assert error["type"].endswith("Error") and len(error["message"]) > 5
            seen[case.method, case.path, response.status_code // 100] += 1

        if mode is GenerationMode.POSITIVE or operation.body:  # no string is a wrong one in a path
            run()
    for path, body in SERVED.items():
        assert seen["POST", path, 4] > 5
        # Whether a made-up request is served is chance; these are, whatever came before.
        assert httpx.post(api.get_base_url().rstrip("/") + path, json=body, timeout=20).status_code == 200, path


def test_the_specification_is_valid_and_tells_the_bodies(api):
    api.validate()
    paths = api.raw_schema["paths"]
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        operation = paths[path]["post"]
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        fields = api.raw_schema["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
        assert "model" in fields and len(fields) >= 2
        assert {"200", "4XX"} <= operation["responses"].keys() and "422" not in operation["responses"]
