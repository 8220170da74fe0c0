"""scripts/generate.py as a process: one prompt, standard input, JSON, and a chat on a terminal."""

import json
import os
import pty
import subprocess
import time


def finish(process, text=None):
    out, err = process.communicate(text, timeout=30)
    assert process.returncode == 0, err
    return out


def test_one_prompt(program):
    assert finish(program("generate.py", "--prompt", "hi", "--temperature=0.5")) == "Hello 👋!\n"


def test_standard_input_without_template(program):
    assert finish(program("generate.py", "--raw", "--stop", "lo", stdin=subprocess.PIPE), "hi") == "Hel\n"


def test_json(program):
    result = json.loads(finish(program("generate.py", "--prompt=hi", "--json", "--system=be brief")))
    assert result["text"] == "Hello 👋!" and result["finish_reason"] == "stop"
    assert result["prompt_tokens"] > 10 and result["completion_tokens"] > 3


def test_users_errors(program):
    cases = (
        (["--prompt= "], "the prompt is empty"),
        (["--prompt=hi", "--temperature=-1"], "temperature is -1"),
        (["--prompt=hi", "--max-tokens=0"], "max_tokens is 0"),
        (["missing", "--prompt=hi"], "no such file"),
    )
    for arguments, text in cases:
        process = program("generate.py", *arguments)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 2 and text in err and "Traceback" not in err


def test_chat_on_a_terminal(program):
    leader, follower = pty.openpty()
    process = program("generate.py", "--system=x", stdin=follower)
    os.write(leader, b"first\nsecond\n\n")
    out = finish(process)
    os.close(follower)
    os.close(leader)
    assert out.count("Hello 👋!\n") == 2 and out.startswith("> ")


def test_leaving_the_chat_with_control_d(program):
    leader, follower = pty.openpty()
    process = program("generate.py", stdin=follower)
    time.sleep(1)
    os.write(leader, b"\x04")
    assert finish(process) == "> \n"
    os.close(follower)
    os.close(leader)
