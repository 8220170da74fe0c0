"""scripts/serve.py as a process: ready line, signals, exit codes."""

import collections
import json
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest


def ready(process):
    """(url, lines of the ready message)"""
    first = process.stdout.readline()
    assert first.startswith("jaxkv is ready: http://127.0.0.1:"), (first, process.stderr.read() if not first else "")
    return first.split()[3], [first, process.stdout.readline(), process.stdout.readline()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ready_line_then_answers_then_stops_cleanly(program, number):
    process = program("serve.py", "--port", "0", "--served-model-name", "mine,other")
    url, lines = ready(process)
    assert lines[0].rstrip().endswith("(model mine)")
    pasted = subprocess.run("".join(lines[1:]), shell=True, capture_output=True, text=True, timeout=20)
    assert '"content":"Hello 👋!"' in pasted.stdout, pasted
    assert httpx.get(f"{url}/v1/models").json()["data"][1]["id"] == "other"
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, ""), err
    assert err == "load: 1 done\n"


def test_a_port_in_use_is_one_line_and_costs_no_loading(program):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = program("serve.py", f"--port={port}")
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (2, "")
    assert err == f"error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port or --host\n"


def test_a_users_error_is_one_line(program):
    for arguments, text in (
        (["missing"], "no such file"),
        (["--swap-space=4"], "no flag --swap-space"),
        (["a", "b"], "a, b"),
        (["--api_key=one,two", "--api_key_names=alice"], "--api_key_names has 1 names for 2 API keys"),
        (["--api_key_names=alice"], "--api_key_names has 1 names for 0 API keys"),
        (["--request_log=/nowhere/log"], "request_log is /nowhere/log, which cannot be written: No such file"),
        (["--request_log_tokens"], "--request_log_tokens needs --request_log=FILE"),
    ):
        process = program("serve.py", "--port=0", *arguments)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out) == (2, "")
        assert err.startswith("error: ") and text in err and err.count("\n") == 1


def test_help(program):
    process = program("serve.py", "--help")
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    for heading in ("model", "memory", "scheduling", "execution", "server", "watching"):
        assert f"\n{heading}:\n" in out
    assert "--host=TEXT" in out and "(default: 127.0.0.1)" in out and "--[no-]enable_prefix_caching" in out


def test_an_engine_failure_ends_the_program_with_an_error(program):
    process = program("serve.py", "--port=0", "--api-key=k")
    url, lines = ready(process)
    assert "authorization: Bearer KEY" in lines[1]
    headers = {"authorization": "Bearer k"}
    assert httpx.get(f"{url}/v1/models").status_code == 401
    response = httpx.post(f"{url}/v1/completions", json={"prompt": "break"}, headers=headers, timeout=20)
    assert response.status_code == 503 and "ZeroDivisionError" in response.json()["error"]["message"]
    out, err = process.communicate(timeout=20)
    assert process.returncode == 1 and "error: the engine failed: ZeroDivisionError" in err


def test_requests_in_progress_do_not_hold_up_the_end_for_long(program):
    process = program("serve.py", "--port=0")
    url, _ = ready(process)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as idle:
        idle.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        begin = time.monotonic()
        process.terminate()
        process.communicate(timeout=20)
    assert process.returncode == 0 and time.monotonic() - begin < 15


def ask_slowly(url, answer, **body):
    """Starts a request of 0.2 s a token in a thread; `answer` gets status and text."""

    def ask():
        body_ = {"prompt": "slowly", "ignore_eos": True} | body
        with httpx.stream("POST", f"{url}/v1/completions", json=body_, timeout=60) as response:
            answer.extend((response.status_code, response.read().decode()))

    client = threading.Thread(target=ask)
    client.start()
    time.sleep(1)
    return client


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_outlast_the_drain_timeout_are_told(program, stream):
    process = program("serve.py", "--port=0", "--drain_timeout=1.5")
    url, _ = ready(process)
    answer = []
    client = ask_slowly(url, answer, max_tokens=200, stream=stream)
    process.terminate()
    _, err = process.communicate(timeout=30)
    client.join(10)
    assert process.returncode == 0 and "Traceback" not in err, err
    status, text = answer
    assert status == (200 if stream else 503) and "shut down" in text, text[-300:]
    assert not stream or text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_running_requests_finish_and_begins_no_others(program, number):
    process = program("serve.py", "--port=0")
    url, _ = ready(process)
    answer = []
    client = ask_slowly(url, answer, max_tokens=12)
    process.send_signal(number)
    time.sleep(0.3)
    assert httpx.get(f"{url}/health").status_code == 503 and httpx.get(f"{url}/version").status_code == 200
    refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
    assert "shutting down" in refused.json()["error"]["message"]
    client.join(20)
    status, text = answer
    assert status == 200 and '"completion_tokens":12' in text
    begin = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0 and "Traceback" not in err, err
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(program, number):
    process = program("serve.py", "--port=0")
    url, _ = ready(process)
    client = threading.Thread(target=lambda: pytest.raises(httpx.HTTPError, ask_slowly_alone, url))
    client.start()
    time.sleep(1)
    process.send_signal(number)
    time.sleep(0.5)
    assert process.poll() is None  # it waits for the request
    process.send_signal(number)
    process.wait(timeout=2)
    assert process.returncode == 128 + number
    client.join(10)


def ask_slowly_alone(url):
    httpx.post(f"{url}/v1/completions", json={"prompt": "slowly", "max_tokens": 200, "ignore_eos": True}, timeout=60)


def test_it_answers_while_the_model_loads(program):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = program("serve.py", f"--port={port}", "large")
    url = f"http://127.0.0.1:{port}"
    seen = []
    while not seen or seen[-1] != 200:
        try:
            response = httpx.get(f"{url}/health")
            seen.append(response.status_code)
            if seen[-1] == 503:
                assert "still loading" in response.json()["error"]["message"]
                assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code in (503, 200)
        except httpx.ConnectError:
            assert not seen and process.poll() is None, "it answered before"
        time.sleep(0.1)
    assert set(seen[:-1]) == {503}  # how often hangs on the machine


def test_a_signal_while_loading_ends_it_at_once(program):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = program("serve.py", f"--port={port}", "large")
    while True:
        try:
            assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 503
            break
        except httpx.ConnectError:
            time.sleep(0.05)
    process.terminate()
    begin = time.monotonic()
    assert process.wait(timeout=10) == 0 and time.monotonic() - begin < 1


@pytest.mark.parametrize("given", ["flag", "environment"])
def test_several_api_keys_none_of_them_logged(program, monkeypatch, given):
    keys = "first-secret,second-secret"
    if given == "environment":
        monkeypatch.setenv("JAXKV_API_KEY", keys)
    process = program("serve.py", "--port=0", "--log_level=debug", *(["--api-key", keys] if given == "flag" else []))
    url, lines = ready(process)
    for key, status in (("first-secret", 200), ("second-secret", 200), (keys, 401), ("first", 401), ("x", 401)):
        assert httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == status
    process.terminate()
    out, err = process.communicate(timeout=20)
    assert "secret" not in "".join(lines) + out + err and process.returncode == 0


def test_the_dashboard_of_a_server_that_has_begun(program, tmp_path):
    path = tmp_path / "requests.jsonl"
    process = program("serve.py", "--port=0", f"--request_log={path}", "--api_key=sk-one", "--api_key_names=alice")
    url, _ = ready(process)
    data = httpx.get(f"{url}/dashboard/data").json()
    assert data["failed"] is None and len(data["history"]["time"]) == 1 and "sk-one" not in str(data)
    assert httpx.get(f"{url}/dashboard").status_code == 200 and path.read_text() == ""
    process.terminate()
    assert process.wait(timeout=20) == 0


def test_connections_end_when_a_client_reads_nothing_for_a_minute():
    """Here only that the system is told; tests/server shows what comes of it."""
    code = f"""
import runpy, socket
bind = runpy.run_path({str(pathlib.Path(__file__).parents[2] / "scripts" / "serve.py")!r})["_bind"]
listener = bind("127.0.0.1", 0)
client = socket.create_connection(listener.getsockname())
print(listener.accept()[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("60000\n", "")


class Crowd:
    """Clients that all have a request open, each with a socket of its own.

    Attributes:
      answers: (kind, all that came until the server closed) of each.
    """

    def __init__(self, url):
        host, port = url.removeprefix("http://").split(":")
        self._address = (host, int(port))
        self._threads: list[threading.Thread] = []
        self.answers: list[tuple[str, str]] = []

    def ask(self, kind, **body):
        body = json.dumps({"prompt": "slowly", "ignore_eos": True} | body).encode()
        self.send(kind, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    def send(self, kind, data):
        thread = threading.Thread(target=self._listen, args=(kind, data))
        self._threads.append(thread)
        thread.start()

    def _listen(self, kind, data):
        with socket.create_connection(self._address, timeout=60) as connection:
            connection.sendall(data)
            parts = []
            try:
                while part := connection.recv(2**16):
                    parts.append(part)
                    if parts[-1].endswith((b"\r\n0\r\n\r\n", b"]}}")):
                        break
            except ConnectionResetError:
                parts.append(b"(reset)")
        self.answers.append((kind, b"".join(parts).decode()))

    def join(self):
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


# Status and words of each kind's answer; the beginnings of those that get none.
ENDINGS = {
    "short stream": (200, '"finish_reason":"length"'), "short": (200, '"text":"xxxxxxxxxx"'),
    "long stream": (200, "the engine has been shut down"), "long": (503, "was shut down before"),
    "grammar": (503, "was shut down before"),
}  # fmt: skip
NO_REQUESTS = {
    "idle": b"", "half a head": b"POST /v1/comp",
    "half a body": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{",
}  # fmt: skip


def test_a_signal_with_a_crowd_of_clients(program):
    """Streams and whole answers that end in time and that do not, grammars that take long, and what is no request yet."""
    process = program("serve.py", "--port=0", "--drain_timeout=4", "--max_num_queued_reqs=100")
    url, _ = ready(process)
    crowd = Crowd(url)
    for _ in range(12):
        crowd.ask("short stream", max_tokens=10, stream=True)
        crowd.ask("short", max_tokens=10)
        crowd.ask("long stream", max_tokens=200, stream=True)
        crowd.ask("long", max_tokens=200)
    for i in range(4):
        hostile = {"json": {"type": "integer", "multipleOf": 99_999_989 + i}}
        crowd.ask("grammar", max_tokens=10, structured_outputs=hostile)
    for kind, data in NO_REQUESTS.items():
        crowd.send(kind, data)
        crowd.send(kind, data)
    time.sleep(1.5)
    begin = time.monotonic()
    process.terminate()
    time.sleep(0.5)
    refused = [httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code for _ in range(10)]
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0 and time.monotonic() - begin < 4 + 5
    assert "Traceback" not in err and "ERROR" not in err, err
    crowd.join()
    assert refused == [503] * 10
    expected = dict.fromkeys(NO_REQUESTS, 2) | dict.fromkeys(ENDINGS, 12) | {"grammar": 4}
    assert collections.Counter(kind for kind, _ in crowd.answers) == expected
    # A hostile grammar takes 3 s of CPU, one after another: on a fast machine the first is refused in time.
    refused_grammars = [answer for _, answer in crowd.answers if "too much time" in answer]
    assert len(refused_grammars) <= 1
    for kind, answer in crowd.answers:
        if kind in NO_REQUESTS:
            assert answer == "", (kind, answer)
        elif answer not in refused_grammars:
            (status, told), tokens = ENDINGS[kind], answer.count('"text":"x"')
            assert answer.startswith(f"HTTP/1.1 {status} ") and told in answer, (kind, answer[-300:])
            assert answer.endswith("data: [DONE]\n\n\r\n0\r\n\r\n") == ("stream" in kind), (kind, answer[-300:])
            assert kind != "short stream" or tokens == 10
