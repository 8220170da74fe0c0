import pathlib
import runpy

import pytest

SMALL = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "small_tokenizers.py"))


@pytest.fixture(scope="session")
def small():
    """The names of tests/small_tokenizers.py."""
    return SMALL


@pytest.fixture(scope="session")
def byte_level():
    return SMALL["byte_level"]()


@pytest.fixture(scope="session")
def sentencepiece():
    return SMALL["sentencepiece"]()


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece", "sentencepiece_no_prefix"])
def tokenizer(request):
    if request.param == "sentencepiece_no_prefix":
        return SMALL["sentencepiece"](add_space_prefix=False)
    return SMALL[request.param]()
