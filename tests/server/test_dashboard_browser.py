"""/dashboard as a browser shows it (`make test-browser`); what it is told is tested in test_dashboard.py."""

import re

import httpx
import pytest
from starlette.responses import PlainTextResponse

from tests.support import browser
from tests.support.traffic_scenario import ScenarioServer

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("dashboard")


@pytest.fixture(scope="module")
def hidden_tail():
    with ScenarioServer("hidden_tail") as server:
        yield server


def text_of(dom):
    """What a reader sees, tags left out; `\\n` between elements."""
    body = re.sub(r"<(script|style)>.*?</\1>", "", dom, flags=re.DOTALL)
    return re.sub(r"<[^>]*>", "\n", body)


def row_of(dom, name):
    """The cells of the table row that begins with `name`, as texts; its class first."""
    (row,) = [row for row in re.findall(r"<tr[^>]*>.*?</tr>", dom) if f'title="{name}"' in row]
    kind = re.match(r'<tr(?: class="([^"]*)")?', row)[1]
    return kind, [text_of(cell).replace("\n", "") for cell in re.findall(r"<td[^>]*>.*?</td>", row)]


def test_the_averages_trap_can_be_seen(hidden_tail, folder):
    seen = browser.look(f"{hidden_tail.url}/dashboard", folder, "hidden_tail")
    assert 'data-state="live"' in seen.dom and "<title>91 % hits · simulated-8b · jaxkv</title>" in seen.dom
    text = text_of(seen.dom)
    assert "A mean hit rate of 91 % hides a slow tail of misses:" in text
    assert re.search(r"Prompts of 2049-8192 tokens\s+\(6 requests\): hit rate 0 %, TTFT P99 793 ms, 10 times", text)
    assert "Caller reports" in text
    kind, cells = row_of(seen.dom, "2049-8192")
    assert kind == "bad" and cells[3] == "0 %" and cells[7] == "793 ms"
    kind, cells = row_of(seen.dom, "513-2048")
    assert kind is None and cells[3] == "93 %" and cells[7] == "83 ms"
    assert seen.dom.count("<path") >= 7 and "NaN" not in seen.dom and "undefined" not in text
    assert all(part > 230 for part in seen.corner())


def test_dark_and_narrow(hidden_tail, folder):
    seen = browser.look(f"{hidden_tail.url}/dashboard", folder, "dark_narrow", width=500, height=2700, dark=True)
    assert 'data-state="live"' in seen.dom and all(part < 40 for part in seen.corner())


def test_many_callers_one_of_them_with_a_script_for_a_name(folder):
    with ScenarioServer("busy") as server:
        seen = browser.look(f"{server.url}/dashboard", folder, "busy", dark=True)
    assert "<title>81 % hits" in seen.dom  # not "owned"
    assert "&lt;script&gt;document.title = 'owned'&lt;/script&gt;" in seen.dom
    assert seen.dom.count("<script") == 1
    text = text_of(seen.dom)
    assert "(other)" in text and "evicted before reuse" in text and "31\n" in text and "64 waiting" in text


def test_it_is_live(hidden_tail, folder):
    """A request that came in the meantime is seen, and so is who sent it: as text."""
    name = "<img src=x onerror=\"document.title='owned'\">"
    answer = httpx.post(
        f"{hidden_tail.url}/v1/completions", json={"prompt": "live", "max_tokens": 3}, headers={"x-caller": name}
    )
    assert answer.status_code == 200
    seen = browser.look(f"{hidden_tail.url}/dashboard", folder, "live", milliseconds=3000)
    assert "1,277 requests of the last 15 min" in seen.dom and "owned'" in text_of(seen.dom).replace("&quot;", "'")
    assert "<img" not in seen.dom and "simulated-8b · jaxkv</title>" in seen.dom


def test_nothing_yet(folder):
    with ScenarioServer("empty") as server:
        seen = browser.look(f"{server.url}/dashboard", folder, "empty", height=1300)
    text = text_of(seen.dom)
    assert "<title>no requests" in seen.dom and "no request has ended yet" in text and "hides a slow tail" not in text
    assert "NaN" not in seen.dom and "undefined" not in seen.dom.split("<script>")[0]


def test_a_server_that_stops_answering_is_told(folder):
    def broken(app):
        asked = []

        async def front(scope, receive, send):
            if scope["path"] == "/dashboard/data":
                asked.append(scope["path"])
                if len(asked) % 2 == 0:  # each of the two runs of the browser gets one answer
                    await PlainTextResponse("broken", 500)(scope, receive, send)
                    return
            await app(scope, receive, send)

        return front

    with ScenarioServer("calm", around=broken) as server:
        seen = browser.look(f"{server.url}/dashboard", folder, "lost", milliseconds=3000)
    assert 'data-state="lost"' in seen.dom and "no answer since" in seen.dom
    assert "93 %" in text_of(seen.dom)  # what was known stays


def test_it_asks_again_and_again(folder):
    asked = []

    def counting(app):
        async def front(scope, receive, send):
            asked.append(scope["path"])
            await app(scope, receive, send)

        return front

    with ScenarioServer("empty", around=counting) as server:
        browser.look(f"{server.url}/dashboard", folder, "polling", milliseconds=7000)
    assert set(asked) == {"/dashboard", "/dashboard/data"}  # and nothing else, nowhere
    assert asked.count("/dashboard") == 2 and asked.count("/dashboard/data") >= 6  # the browser runs twice
