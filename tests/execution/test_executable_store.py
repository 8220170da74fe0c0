"""Executables on disk: found again without tracing, and never in place of another."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxkv.control.engine import Engine
from jaxkv.core.clock import MonotonicClock
from jaxkv.core.progress import SilentProgress
from jaxkv.core.request import Request, SamplingParams
from jaxkv.execution import executable_store
from jaxkv.execution.executable_store import ExecutableStore
from jaxkv.execution.jax_executor import JaxExecutor
from jaxkv.execution.programs import Programs, abstract_model
from tests.support.compile_counter import counting_compilations
from tests.support.tiny_models import random_tokens
from tests.support.tiny_programs import make_programs, run_requests, tiny_llama, tokens_of, weights


def with_store(folder, **limits) -> Programs:
    shapes = make_programs(tiny_llama(), **limits).shapes
    model = abstract_model(shapes.model, dtype="float32", max_model_len=shapes.limits.max_model_len)
    return Programs(model, shapes, ExecutableStore(folder))


def doubled(by: int) -> jax.stages.Compiled:
    return jax.jit(lambda x: x * by, donate_argnums=0).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()


def test_a_second_start_traces_and_compiles_nothing(tmp_path):
    first = with_store(tmp_path)
    cold = first.compile(SilentProgress())
    assert (cold.executables, cold.from_cache) == (7, 0) and len(list(tmp_path.iterdir())) == 7
    assert with_store(tmp_path, num_blocks=33).shapes != first.shapes  # and so other files: names hold the shapes
    assert ExecutableStore(tmp_path).load(f"{('copy', None)}|{with_store(tmp_path, num_blocks=33).shapes}") is None
    assert ExecutableStore(tmp_path).load(f"{('copy', None)}|{first.shapes}") is not None
    second = with_store(tmp_path)
    with counting_compilations() as count:
        second.start(SilentProgress())
        temporaries = second.temporaries()
        warm = second.finish()
    assert (warm.executables, warm.from_cache) == (7, 7)
    assert (count.compilations, count.traces) == (0, 0)
    first.start(SilentProgress())
    assert temporaries == first.temporaries() > 0
    first.stop()
    # What was loaded computes the same, and gives its donated cache back in place.
    tokens = []
    for programs in (first, second):
        engine = Engine(JaxExecutor(programs, weights(tiny_llama()), MonotonicClock()), clock=MonotonicClock())
        sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=12, logprobs=2, repetition_penalty=1.3)
        tokens.append(tokens_of(run_requests(engine, [Request("a", random_tokens(30, seed=1), sampling)])["a"]))
    assert tokens[0] == tokens[1] and len(tokens[0]) == 12
    for programs in (first, second):
        cache = programs.shapes.empty_cache()
        where = cache.layers[0].k.unsafe_buffer_pointer()
        cache = programs.copy_blocks(cache, *programs.pack_copies(()).pop())
        assert cache.layers[0].k.unsafe_buffer_pointer() == where


def test_what_jaxs_own_cache_gave_back_is_not_stored(tmp_path):
    """Serialised a second time it has lost its functions, and fails when it runs."""
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    seconds, size = "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes"
    before = {name: getattr(jax.config, name) for name in (seconds, size)}
    try:
        jax.config.update(seconds, 0)
        jax.config.update(size, -1)
        with_store(tmp_path / "a", num_blocks=35).compile(SilentProgress())
        with_store(tmp_path / "b", num_blocks=35).compile(SilentProgress())
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    stored = [len(list((tmp_path / name).glob("*.executable"))) for name in "ab"]
    assert stored[0] == 7 and stored[1] <= 3  # "update", "adjust" and "mask" come out of JAX's memory, whole


def test_files_that_nobody_loads_go_after_a_month(tmp_path):
    store = ExecutableStore(tmp_path)
    store.save("old", doubled(2))
    [old] = tmp_path.iterdir()
    os.utime(old, (1, 1))
    assert store.load("old") is not None  # which makes it new again
    store.save("new", doubled(3))
    assert len(list(tmp_path.iterdir())) == 2
    os.utime(old, (1, 1))
    store.save("newer", doubled(5))
    assert len(list(tmp_path.iterdir())) == 2 and not old.exists()


def test_what_is_found_is_what_was_stored(tmp_path):
    store = ExecutableStore(tmp_path)
    assert store.load("two") is None
    store.save("two", doubled(2))
    store.save("three", doubled(3))
    for name, factor in (("two", 2), ("three", 3)):
        result = store.load(name)(jnp.arange(3, dtype=jnp.float32))
        assert np.array_equal(result, factor * np.arange(3))
    assert store.load("four") is None


def test_another_source_text_or_version_finds_nothing(tmp_path, monkeypatch):
    store = ExecutableStore(tmp_path)
    store.save("two", doubled(2))
    monkeypatch.setattr(executable_store, "_world", lambda: "another")
    assert store.load("two") is None


def test_damaged_files_are_compiled_anew(tmp_path, caplog):
    store = ExecutableStore(tmp_path)
    store.save("two", doubled(2))
    [path] = tmp_path.iterdir()
    for damage in (b"", path.read_bytes()[:-100], b"no pickle"):
        path.write_bytes(damage)
        caplog.clear()
        assert store.load("two") is None and "compiling instead" in caplog.text
    store.save("two", doubled(2))
    assert store.load("two") is not None


def test_without_a_folder_or_where_none_can_be_made_nothing_is_stored(tmp_path, caplog):
    ExecutableStore("").save("two", doubled(2))
    assert ExecutableStore("").load("two") is None
    blocked = tmp_path / "file"
    blocked.write_text("")
    ExecutableStore(blocked).save("two", doubled(2))
    assert "cannot store" in caplog.text and blocked.read_text() == ""


def test_the_world_is_told_by_source_versions_and_device():
    world = executable_store._world()
    assert jax.__version__ in world and jax.devices()[0].device_kind in world
    assert len(world.split("|")[0]) == 64


@pytest.fixture(autouse=True)
def no_compilation_cache():
    """JAX's own cache would hand out executables that cannot be stored again."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_a_machine_with_several_devices_loads_for_one(tmp_path):
    program = (
        "import jax, jax.numpy as jnp\n"
        "from jaxkv.execution.executable_store import ExecutableStore\n"
        f"store = ExecutableStore({str(tmp_path)!r})\n"
        "store.save('two', jax.jit(lambda x: x * 2).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile())\n"
        "print(len(jax.devices()), store.load('two')(jnp.arange(3.0)).tolist())\n"
    )
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split("\n")[0] == "4 [0.0, 2.0, 4.0]", done.stderr
