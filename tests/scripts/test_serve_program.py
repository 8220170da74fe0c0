"""scripts/serve.py as a process: ready line, signals, exit codes."""

import signal
import socket
import subprocess
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
    ):
        process = program("serve.py", "--port=0", *arguments)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out) == (2, "")
        assert err.startswith("error: ") and text in err and err.count("\n") == 1


def test_help(program):
    process = program("serve.py", "--help")
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    for heading in ("model", "memory", "scheduling", "execution", "server"):
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


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_outlast_the_grace_period_are_told(program, stream):
    process = program("serve.py", "--port=0")
    url, _ = ready(process)
    answer = []
    body = {"prompt": "slowly", "stream": stream, "max_tokens": 200, "ignore_eos": True}

    def ask():
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            answer.extend((response.status_code, response.read().decode()))

    client = threading.Thread(target=ask)
    client.start()
    time.sleep(1)
    process.terminate()
    _, err = process.communicate(timeout=30)
    client.join(10)
    assert process.returncode == 0 and "Traceback" not in err, err
    status, text = answer
    assert status == (200 if stream else 503) and "shut down" in text, text[-300:]
    assert not stream or text.endswith("data: [DONE]\n\n")
