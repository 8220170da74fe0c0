"""Who sent a request: where the name comes from, what it may hold, and who gets to see it."""

import json

import pytest

from jaxkv.insight.request_log import RequestLog
from jaxkv.insight.traffic import MOST_CALLERS, Traffic
from jaxkv.server.callers import caller_of
from tests.support.traffic_scenario import play

KEYS = {"api_keys": ["sk-alpha==", "sk-beta"], "api_key_names": ["alice", "bob"]}


@pytest.fixture
def sim(serve, byte_level):
    """serve(...) with the real scheduler behind it."""

    def start(**options):
        engine = play("empty").engine
        return serve(engine=engine, **options)

    return start


def ask(server, headers=None, **body):
    response = server.http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2} | body, headers=headers)
    assert response.status_code == 200, response.text
    return response


def callers(server):
    return [group["name"] for group in server.http.get("/dashboard/data").json()["by_caller"]]


@pytest.mark.parametrize(
    ("headers", "user", "expected"),
    [
        ({"x-caller": "proxy"}, "user-7", "proxy"),
        ({}, "user-7", "user-7"),
        ({}, None, "bob"),
        ({"x-caller": ""}, " ", "bob"),
        ({"x-caller": ""}, "  spaces around  ", "spaces around"),
    ],
)
def test_where_a_name_comes_from(sim, headers, user, expected):
    server = sim(guards=KEYS)
    ask(server, {"authorization": "Bearer sk-beta", **headers}, **({} if user is None else {"user": user}))
    assert callers(server) == [expected]
    assert f'jaxkv_recent_caller_requests{{caller="{expected}"' in server.http.get("/metrics").text


def test_without_names_nobody_is_named(sim):
    server = sim(guards={"api_keys": ["sk-alpha=="]})
    ask(server, {"authorization": "Bearer sk-alpha=="})
    assert callers(server) == ["(none)"]


def test_chats_have_callers_too(sim):
    server = sim()
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "user": "chatter", "stream": True}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200
    assert callers(server) == ["chatter"]


@pytest.mark.parametrize(
    ("given", "cleaned"),
    [
        ("x" * 65, "x" * 64),
        ("a\nb\x00c\x7f", "a\ufffdb\ufffdc\ufffd"),
        ("\u202eevil", "\ufffdevil"),
        ("\ud800", "\ufffd"),
        ("Zoë 🦊", "Zoë 🦊"),
        ("\n", None),
    ],
)
def test_names_are_short_and_printable(given, cleaned):
    assert caller_of({"headers": []}, given) == cleaned


def test_a_header_of_any_bytes_is_a_name():
    assert caller_of({"headers": [(b"x-caller", b"caf\xe9")]}, None) == "caf\ufffd"
    assert caller_of({"headers": [(b"x-caller", "Zoë".encode())]}, "other") == "Zoë"


def test_strange_names_break_nothing(sim):
    server = sim()
    names = ["<script>alert(1)</script>", 'a"b\\c', "{}=,", "(other)", "(none)", "😀" * 100]
    for name in names:
        ask(server, user=name)
    ask(server)
    text = server.http.get("/metrics").text
    assert 'caller="a\\"b\\\\c"' in text and text.count("jaxkv_recent_caller_requests{") == 6
    assert set(callers(server)) == {*names[:5], "😀" * 64}


def test_there_are_never_many_names(sim):
    server = sim()
    for number in range(MOST_CALLERS + 5):
        ask(server, user=f"u{number:02}", prompt="x" * (200 - number))
    assert callers(server) == [*[f"u{number:02}" for number in range(MOST_CALLERS)], "(other)"]
    assert server.http.get("/metrics").text.count("jaxkv_recent_caller_requests{") == MOST_CALLERS + 1


def test_names_can_be_kept_from_the_open_pages(sim, tmp_path):
    path = tmp_path / "log"
    log = RequestLog(str(path))
    server = sim(traffic=Traffic(log, names_callers=False, max_age=0))
    for _ in range(3):
        ask(server, user="somebody@example.org")
    log.close()
    for page in ("/metrics", "/dashboard/data", "/dashboard"):
        text = server.http.get(page).text
        assert "somebody" not in text and "caller_" not in text
    assert [json.loads(line)["caller"] for line in path.read_text().splitlines()] == ["somebody@example.org"] * 3


def test_no_secret_is_told(sim, tmp_path):
    path = tmp_path / "log"
    log = RequestLog(str(path), token_ids=True)
    server = sim(guards=KEYS, traffic=Traffic(log, max_age=0))
    for key in KEYS["api_keys"]:
        ask(server, {"authorization": f"Bearer {key}"}, cache_salt="pepper")
    log.close()
    told = [server.http.get(page).text for page in ("/metrics", "/dashboard/data", "/dashboard")] + [path.read_text()]
    assert not any("sk-" in text or "pepper" in text for text in told)
    assert [json.loads(line)["caller"] for line in told[-1].splitlines()] == ["alice", "bob"]


def test_the_log_names_requests_as_the_answers_do(sim, tmp_path):
    log = RequestLog(str(tmp_path / "log"))
    server = sim(traffic=Traffic(log, max_age=0))
    answer = ask(server).json()
    log.close()
    record = json.loads((tmp_path / "log").read_text())
    assert answer["id"].removeprefix("cmpl-") == record["request_id"].removesuffix("-0")
    assert answer["usage"]["prompt_tokens"] == record["prompt_tokens"]
