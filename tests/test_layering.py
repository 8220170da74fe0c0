"""Arrows only go down, and the control plane never sees jax.

The table below is the architecture: what each part may import, of jaxkv and of the libraries that shape a design. An
import inside a function counts like any other.
"""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# Each part of the source, and the parts of it that it may import. A module of jaxkv is a part of its own.
MAY_IMPORT = {
    "pallas_kernels": set(),
    "jaxkv.core": set(),
    "jaxkv.control": {"jaxkv.core"},
    "jaxkv.simulation": {"jaxkv.control", "jaxkv.core"},
    "jaxkv.insight": {"jaxkv.simulation", "jaxkv.control", "jaxkv.core"},
    "jaxkv.models": {"jaxkv.core", "pallas_kernels"},
    "jaxkv.loading": {"jaxkv.models", "jaxkv.tokenization", "jaxkv.core"},
    "jaxkv.tokenization": {"jaxkv.loading", "jaxkv.core"},
    "jaxkv.constraints": {"jaxkv.control", "jaxkv.tokenization", "jaxkv.core"},
    "jaxkv.execution": {"jaxkv.control", "jaxkv.models", "jaxkv.core", "pallas_kernels"},
}
LOWER = {"pallas_kernels", *MAY_IMPORT}
# What assembles the parts, and what talks to users: above all of the former.
TOP = {"jaxkv", "jaxkv.startup", "jaxkv.async_engine", "jaxkv.llm", "jaxkv.console", "jaxkv.flags"}
TOP |= {"jaxkv.measurement", "jaxkv.settings", "jaxkv.program_plan", "jaxkv.device", "jaxkv.capacity", "jaxkv.kv_quality"}
MAY_IMPORT |= {name: LOWER | TOP for name in TOP}
MAY_IMPORT["jaxkv.server"] = LOWER | TOP

# jax and what brings it along.
JAX = {"jax", "jaxlib", "flax", "orbax", "chex"}
NO_JAX = {"jaxkv.core", "jaxkv.control", "jaxkv.simulation", "jaxkv.insight", "jaxkv.tokenization", "jaxkv.constraints"}
NO_JAX |= {"jaxkv.server"}
STANDARD_LIBRARY_ONLY = {"jaxkv.core", "jaxkv.control", "jaxkv.simulation", "jaxkv.insight"}
SOURCES = sorted((ROOT / "jaxkv").rglob("*.py")) + sorted((ROOT / "pallas_kernels").rglob("*.py"))


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            yield node.module
            # `from jaxkv import llm` imports a module that only the names tell.
            if node.module in ("jaxkv", "pallas_kernels"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(module):
    """The part that a module of ours belongs to; None for anybody else's."""
    names = module.split(".")
    if names[0] == "pallas_kernels":
        return "pallas_kernels"
    if names[0] != "jaxkv":
        return None
    part = ".".join(names[:2])
    return part if part in MAY_IMPORT else "jaxkv"  # a public name, as in `from jaxkv import LLM`


def module_of(path):
    names = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def imports():
    """(importing part, imported module, path) of every import in the source."""
    for path in SOURCES:
        part = part_of(module_of(path))
        for module in imported_modules(path):
            yield part, module, path.relative_to(ROOT)


def test_every_part_is_in_the_table():
    parts = {".".join(module_of(path).split(".")[:2]) for path in SOURCES if path.parts[-1] != "__init__.py"}
    parts = {part for part in parts if not part.startswith("pallas_kernels")}
    assert {"jaxkv.core", "jaxkv.control", "jaxkv.simulation"} <= parts
    assert parts <= set(MAY_IMPORT), f"not in the table: {parts - set(MAY_IMPORT)}"


def test_arrows_only_go_down():
    wrong = [
        f"{path} imports {module}"
        for part, module, path in imports()
        if (target := part_of(module)) is not None and target != part and target not in MAY_IMPORT[part]
    ]
    assert not wrong, "\n".join(wrong)


def test_execution_knows_only_the_protocol_of_the_control_plane():
    wrong = [
        f"{path} imports {module}"
        for part, module, path in imports()
        if part == "jaxkv.execution" and module.startswith("jaxkv.control") and module != "jaxkv.control.executor"
    ]
    assert not wrong, "\n".join(wrong)


def test_libraries_stay_where_they_belong():
    wrong = []
    for part, module, path in imports():
        library = module.split(".")[0]
        if part in NO_JAX and library in JAX:
            wrong.append(f"{path} imports {module}: no jax in {part}")
        if part in STANDARD_LIBRARY_ONLY and library != "jaxkv" and library not in sys.stdlib_module_names:
            wrong.append(f"{path} imports {module}: {part} is plain Python")
        if library == "torch":
            wrong.append(f"{path} imports {module}: no torch at run time")
        if module == "jax._src" or module.startswith("jax._src."):
            wrong.append(f"{path} imports {module}, which is private")
    assert not wrong, "\n".join(wrong)


def test_this_file_sees_all_kinds_of_imports(tmp_path):
    path = tmp_path / "example.py"
    path.write_text("import a.b, c\nfrom d.e import f\nfrom jaxkv import llm\ndef g():\n    import h\n")
    assert list(imported_modules(path)) == ["a.b", "c", "d.e", "jaxkv", "jaxkv.llm", "h"]
    path.write_text("from . import x\n")
    with pytest.raises(AssertionError, match="relative import"):
        list(imported_modules(path))


@pytest.mark.parametrize("module", ["jaxkv", "jaxkv.control.engine", "jaxkv.simulation.replay", "jaxkv.insight.proposals"])
def test_importing_brings_no_jax_along(module):
    code = f"import sys, {module}; print(sorted({JAX | {'numpy', 'torch'}!r} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (run.stdout.strip(), run.stderr) == ("[]", "")
