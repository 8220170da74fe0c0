"""Executables on disk: found again without tracing, and never in place of another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.core.progress import SilentProgress
from jaxkv.execution import executable_store
from jaxkv.execution.executable_store import ExecutableStore
from jaxkv.execution.programs import Programs, abstract_model
from tests.support.compile_counter import counting_compilations
from tests.support.tiny_programs import make_programs, tiny_llama


def with_store(folder, **limits) -> Programs:
    shapes = make_programs(tiny_llama(), **limits).shapes
    model = abstract_model(shapes.model, dtype="float32", max_model_len=shapes.limits.max_model_len)
    return Programs(model, shapes, ExecutableStore(folder))


def doubled(by: int) -> jax.stages.Compiled:
    return jax.jit(lambda x: x * by, donate_argnums=0).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()


def test_a_second_start_traces_and_compiles_nothing(tmp_path):
    first = with_store(tmp_path)
    cold = first.compile(SilentProgress())
    assert (cold.executables, cold.from_cache) == (6, 0) and len(list(tmp_path.iterdir())) == 6
    second = with_store(tmp_path)
    with counting_compilations() as count:
        second.start(SilentProgress())
        temporaries = second.temporaries()
        warm = second.finish()
    assert (warm.executables, warm.from_cache) == (6, 6)
    assert (count.compilations, count.traces) == (0, 0)
    first.start(SilentProgress())
    assert temporaries == first.temporaries() > 0
    first.stop()
    # What was loaded computes, and gives its donated cache back in place.
    for programs in (first, second):
        cache = programs.shapes.empty_cache()
        where = cache.layers[0].k.unsafe_buffer_pointer()
        cache = programs.copy_blocks(cache, *programs.pack_copies(()).pop())
        assert cache.layers[0].k.unsafe_buffer_pointer() == where


def test_other_shapes_are_other_executables(tmp_path):
    with_store(tmp_path).compile(SilentProgress())
    assert with_store(tmp_path, num_blocks=33).compile(SilentProgress()).executables == 6
    assert len(list(tmp_path.iterdir())) == 12


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
    """JAX's own cache would hand out executables that cannot be stored again on some backends."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)
