"""What pip reads."""

import pathlib
import re
import tomllib

PROJECT = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def test_names_of_extras_are_normal_ones():
    """Setuptools writes them as PEP 685 does; pip 23.2, which comes with Python 3.11, then finds no other spelling, warns and
    installs without the extra."""
    extras = PROJECT["optional-dependencies"]
    assert len(extras) > 5
    assert [name for name in extras if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)] == []
