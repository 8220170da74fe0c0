"""`usage.prompt_tokens_details.cached_tokens` is in every answer, and is what the real scheduler found."""

import json

import pytest

from tests.support.traffic_scenario import play

BODIES = {
    "/v1/completions": {"prompt": "x" * 100},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "y" * 100}]},
}


@pytest.mark.parametrize("path", BODIES)
def test_cached_tokens(serve, path):
    server = serve(engine=play("empty").engine)

    def ask(**options):
        response = server.post(path, max_tokens=3, **BODIES[path], **options)
        assert response.status_code == 200, response.text
        if not options.get("stream"):
            return [response.json()["usage"]]
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        return [chunk["usage"] for chunk in map(json.loads, lines) if chunk.get("usage")]

    (first,) = ask()
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    found = {"cached_tokens": first["prompt_tokens"] - 1}
    for options in ({}, {"n": 2}, {"stream": True, "stream_options": {"include_usage": True}}):
        (usage,) = ask(**options)
        assert usage["prompt_tokens_details"] == found and usage["prompt_tokens"] == first["prompt_tokens"]
    told = ask(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert len(told) > 3 and told[-1]["prompt_tokens_details"] == found
    assert all("cached_tokens" in usage["prompt_tokens_details"] for usage in told)
