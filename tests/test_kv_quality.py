"""The figures of a KV format, against numpy on whole logits."""

import numpy as np
import pytest

from jaxkv.kv_quality import KVVariant, summarize, token_figures, with_key_outliers, with_rotation
from tests.support.paged_forward import paged_logits
from tests.support.tiny_models import model_of, parse, random_tensors, random_tokens, tiny_config

IDS = random_tokens(90)
DTYPES = ("float32", "float16", "int8", "int8,int4", "int4")


@pytest.fixture(scope="module")
def model():
    config = parse(tiny_config(num_hidden_layers=1))
    return model_of(config, random_tensors(config))


def figures(model, *dtypes, ids=IDS, chunk=32, room=96):
    variants = [KVVariant(dtype, model, dtype) for dtype in dtypes]
    base = KVVariant("base", model, "float32")
    return dict(zip(dtypes, token_figures(base, variants, ids, chunk=chunk, room=room), strict=True))


@pytest.fixture(scope="module")
def found(model):
    return figures(model, *DTYPES)


def expected(base, logits, ids):
    """TokenFigures of whole logits f32[n, V], in float64."""
    log_p, log_q = (
        x - np.log(np.exp(x).sum(axis=-1, keepdims=True)) for x in (base.astype(float), logits.astype(float))
    )
    kl = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    after = np.arange(len(ids) - 1), np.array(ids[1:])
    return kl, base.argmax(axis=-1) == logits.argmax(axis=-1), -log_p[after], -log_q[after]


def assert_close(found, expected):
    for name, one, other in zip(found._fields, found, expected, strict=True):
        assert one.shape == other.shape, name
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5, err_msg=name)


def test_figures_are_those_of_whole_logits(model, found):
    base = paged_logits(model, IDS)
    for dtype in ("int8", "int4"):
        assert_close(found[dtype], expected(base, paged_logits(model, IDS, dtype=dtype), IDS))


def test_the_base_itself_costs_nothing(found):
    same = found["float32"]
    assert not same.kl.any() and same.agrees.all()
    np.testing.assert_array_equal(same.nll, same.base_nll)


def test_fewer_bits_cost_more(found):
    float16, int8, mixed, int4 = (summarize([found[dtype]]) for dtype in DTYPES[1:])
    assert 0 < float16.kl_mean < int8.kl_mean / 3
    assert int8.kl_mean < mixed.kl_mean / 3 and mixed.kl_mean < int4.kl_mean
    assert float16.top1_agreement >= int8.top1_agreement > int4.top1_agreement


def test_neither_chunks_nor_room_change_them(model, found):
    whole = figures(model, "int8", "int4", chunk=90, room=0)
    for dtype in whole:
        assert_close(whole[dtype], found[dtype])


def test_small_divergences_are_not_rounding_noise(model):
    """KL grows with the square of a difference: a head that is 1e-4 larger, and one that is 1e-3 larger."""

    def scaled(factor):
        tensors = random_tensors(model.config)
        return model_of(model.config, tensors | {"lm_head.weight": tensors["lm_head.weight"] * np.float32(factor)})

    variants = [KVVariant("scaled", scaled(1 + change), "float32") for change in (1e-4, 1e-3)]
    small, large = token_figures(KVVariant("base", model, "float32"), variants, IDS, chunk=32, room=96)
    assert small.kl.min() >= 0
    np.testing.assert_allclose(100 * small.kl, large.kl, rtol=0.05)


@pytest.mark.parametrize("fields", [{}, {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}])
def test_outliers_change_nothing_but_what_rounding_costs(fields):
    config = parse(tiny_config(num_hidden_layers=1, **fields))
    model = model_of(config, random_tensors(config))
    variants = [KVVariant(dtype, with_key_outliers(model, 32.0), dtype) for dtype in ("float32", "int8")]
    variants.append(KVVariant("plain int8", model, "int8"))
    base = KVVariant("base", model, "float32")
    same, outliers, plain = (summarize([f]) for f in token_figures(base, variants, IDS, chunk=32, room=96))
    assert same.kl_mean < 1e-9
    assert outliers.kl_mean > 10 * plain.kl_mean


def test_summary_takes_sequences_together(model):
    first, second = (figures(model, "int4", ids=ids)["int4"] for ids in (IDS[:30], IDS[30:]))
    quality = summarize([first, second])
    kl = np.sort([*first.kl, *second.kl])
    assert quality.num_positions == 90
    assert quality.kl_mean == pytest.approx(kl.mean())
    assert kl[-2] <= quality.kl_p99 <= kl[-1]
    base, ours = (np.mean([*one, *other]) for one, other in zip(first[2:], second[2:], strict=True))
    assert np.log(quality.perplexity) == pytest.approx(ours)
    assert quality.perplexity_change == pytest.approx(np.exp(ours - base) - 1, rel=1e-3)


def test_a_rotated_model_is_the_same_function_until_something_is_rounded(model):
    turned = with_rotation(model)
    assert not model.layers[0].attention.rotates, "the model itself was changed"
    base, outliers = KVVariant("base", model, "float32"), with_key_outliers(model, 32.0)
    variants = [
        KVVariant("exact", turned, "float32"),
        KVVariant("plain", outliers, "int8"),
        KVVariant("rotated", with_rotation(outliers), "int8"),
    ]
    exact, plain, rotated = (
        summarize([figure]).kl_mean for figure in token_figures(base, variants, IDS, chunk=32, room=96)
    )
    assert 0 <= exact < 1e-9 and 0 < 2 * rotated < plain
