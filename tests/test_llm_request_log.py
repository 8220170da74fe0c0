"""LLM.log_requests: a line of JSON for each request, over the real scheduler on a simulated device."""

import pathlib
import runpy
import time

import pytest

from jaxkv.core.errors import ConfigError
from jaxkv.core.request import SamplingParams
from jaxkv.core.request_record import RequestRecord
from jaxkv.llm import LLM
from tests.support.traffic_scenario import play

HERE = pathlib.Path(__file__).parent


@pytest.fixture
def llm():
    tokenizer = runpy.run_path(str(HERE / "small_tokenizers.py"))["byte_level"]()
    started = runpy.run_path(str(HERE / "fake_engine.py"))["fake_started"](play("empty").engine, tokenizer)
    with LLM.from_started(started) as llm:
        yield llm


def test_requests_are_logged_until_the_end(llm, tmp_path):
    path = tmp_path / "requests.jsonl"
    sampling = SamplingParams(max_tokens=4, seed=0, ignore_eos=True)
    llm.generate("before", sampling)
    llm.log_requests(str(path), token_ids=True)
    with pytest.raises(ConfigError, match="logs its requests already"):
        llm.log_requests(str(path))
    (output,) = llm.generate("x" * 40, sampling)
    llm.generate("x" * 40, sampling)
    llm.close()
    first, second = map(RequestRecord.from_json, path.read_text().splitlines())
    assert first.prompt_token_ids == output.prompt_token_ids and first.output_token_ids == output.token_ids
    assert (first.cached_tokens, second.cached_tokens) == (0, 39) and first.blocks == second.blocks != ()
    assert first.caller is None and abs(first.arrival - time.time()) < 60


def test_a_file_that_cannot_be_written(llm, tmp_path):
    with pytest.raises(ConfigError, match="request_log is"):
        llm.log_requests(str(tmp_path))
