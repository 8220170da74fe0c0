"""Tokenizers from every kind of file, against the tokenizers library, transformers and a real model's known ids."""

import dataclasses
import json
import os
import struct
import subprocess
import sys

import pytest

from jaxkv.core.errors import CheckpointError, RequestError
from jaxkv.tokenization.gguf_tokenizer import PRE_TOKENIZERS, gguf_tokenizer, save_pretrained_from_gguf
from jaxkv.tokenization.sentencepiece_bpe import BYTE, CONTROL, NORMAL, UNKNOWN, sentencepiece_tokenizer
from jaxkv.tokenization.tokenizer import load_tokenizer


@dataclasses.dataclass(frozen=True)
class Source:
    kind: str
    path: object
    name: str = "x"


def save_folder(folder, fast, **config):
    folder.mkdir(exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | config))
    return Source("huggingface", folder)


# Hugging Face folders


def test_folder_with_tokens_as_texts_and_objects(tmp_path, small):
    fast = small["byte_level_fast"]()
    eos = {"content": "<|im_end|>", "special": True, "__type": "AddedToken"}
    source = save_folder(
        tmp_path / "m", fast, bos_token="<|endoftext|>", eos_token=eos, chat_template="{{ bos_token }}!"
    )
    tokenizer = load_tokenizer(source)
    assert tokenizer.eos_token_ids == (fast.token_to_id("<|im_end|>"),)
    assert tokenizer.bos_token_id == 0 and not tokenizer.adds_bos
    assert tokenizer.vocab_size == fast.get_vocab_size()
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "<|endoftext|>!"


def test_template_file_wins_over_config_and_flag_over_both(tmp_path, small):
    source = save_folder(
        tmp_path / "m", small["byte_level_fast"](), chat_template=[{"name": "default", "template": "a"}]
    )
    assert load_tokenizer(source).chat_template == "a"
    (source.path / "chat_template.jinja").write_text("b")
    assert load_tokenizer(source).chat_template == "b"
    (tmp_path / "own.jinja").write_text("c")
    assert load_tokenizer(source, chat_template=str(tmp_path / "own.jinja")).chat_template == "c"


def test_another_tokenizer_than_the_models_own(tmp_path, small):
    other = save_folder(tmp_path / "other", small["byte_level_fast"](), eos_token="<|im_end|>")
    tokenizer = load_tokenizer(Source("huggingface", tmp_path / "nothing"), str(other.path))
    assert tokenizer.eos_token_ids == (2,)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path, small):
    fast = small["byte_level_fast"]()
    fast.enable_truncation(3)
    fast.enable_padding(length=8)
    assert len(load_tokenizer(save_folder(tmp_path / "m", fast)).encode("abcdefgh zyx")) > 8


@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("post_processor", [False, True])
def test_bos_is_added_as_the_config_says_and_never_twice(tmp_path, small, add_bos, post_processor):
    from tokenizers import processors

    fast = small["byte_level_fast"]()
    if post_processor:
        fast.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    config = {} if add_bos is None else {"add_bos_token": add_bos}
    tokenizer = load_tokenizer(save_folder(tmp_path / "m", fast, bos_token="<|endoftext|>", **config))
    plain = tokenizer.encode("hello", add_special_tokens=False)
    expected = post_processor if add_bos is None else add_bos
    assert tokenizer.encode("hello") == ([0] if expected else []) + plain
    assert tokenizer.encode("<|endoftext|>hello") == [0, *plain]
    assert tokenizer.encode("<|endoftext|>hello", add_special_tokens=False) == [0, *plain]


def test_special_text_in_the_prompt_becomes_the_token(byte_level):
    assert byte_level.encode("<|im_end|><tool>", add_special_tokens=False) == [2, byte_level.fast.token_to_id("<tool>")]


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, "no tokenizer.json or tokenizer.model"),
        ({"tokenizer.json": "{"}, "tokenizer.json: cannot be loaded"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "[1]"}, "expected a JSON object, found list"),
        ({"tokenizer.model": "no protobuf"}, "damaged sentencepiece model"),
    ],
)
def test_bad_folders_are_named(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=message) as error:
        load_tokenizer(Source("huggingface", tmp_path))
    assert str(tmp_path) in str(error.value)


def test_a_tokenizer_of_another_family_is_refused_by_name(tmp_path):
    from tokenizers import Tokenizer, decoders, models

    fast = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    fast.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="decoder WordPiece.*not supported"):
        load_tokenizer(save_folder(tmp_path / "m", fast))


def test_lone_surrogates_are_the_users_error(tokenizer):
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode("a\ud800b")


def test_unknown_ids_decode_to_nothing(tokenizer):
    assert tokenizer.decode([10**6]) == "" == tokenizer.token_text(10**6)


# sentencepiece


def field(number, wire, payload):
    return bytes([number << 3 | wire]) + payload


def message(number, body):
    size, length = len(body), b""
    while size > 0x7F:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return field(number, 2, length + bytes([size]) + body)


def write_sentencepiece(path, pieces, model_type=2, remove_extra_whitespaces=0):
    body = b"".join(
        message(1, message(1, text.encode()) + field(2, 5, struct.pack("<f", score)) + field(3, 0, bytes([kind])))
        for text, score, kind in pieces
    )
    body += message(2, field(3, 0, bytes([model_type])))
    body += message(3, field(4, 0, bytes([remove_extra_whitespaces])))
    path.write_bytes(body)


PIECES = [
    ("<unk>", 0, UNKNOWN), ("<s>", 0, CONTROL), ("</s>", 0, CONTROL), *((f"<0x{i:02X}>", 0, BYTE) for i in range(256)),
    ("▁a", -1, NORMAL), ("ab", -2, NORMAL), ("▁ab", -3, NORMAL), ("▁", -4, NORMAL), ("a", -5, NORMAL), ("b", -6, NORMAL),
]  # fmt: skip


def test_sentencepiece_file_merges_by_score_and_falls_back_to_bytes(tmp_path):
    write_sentencepiece(tmp_path / "tokenizer.model", PIECES)
    tokenizer = load_tokenizer(Source("huggingface", tmp_path))
    names = [tokenizer.fast.id_to_token(i) for i in tokenizer.encode("ab éb")]
    # "▁a" is the best pair although "ab" is a piece too; "é" is not a piece.
    assert names == ["<s>", "▁ab", "▁", "<0xC3>", "<0xA9>", "b"]
    assert tokenizer.decode(tokenizer.encode("ab éb")) == "ab éb"
    assert tokenizer.special_tokens == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    "change, found", [({"model_type": 1}, "type unigram"), ({"remove_extra_whitespaces": 1}, "whitespaces=True")]
)
def test_other_sentencepiece_models_are_refused(tmp_path, change, found):
    write_sentencepiece(tmp_path / "tokenizer.model", PIECES, **change)
    with pytest.raises(CheckpointError, match=found):
        sentencepiece_tokenizer(tmp_path / "tokenizer.model")


def test_a_truncated_sentencepiece_file_is_named(tmp_path):
    path = tmp_path / "tokenizer.model"
    write_sentencepiece(path, PIECES)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="damaged"):
        sentencepiece_tokenizer(path)


# GGUF


def gguf_bytes(fields):
    def text(value):
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def value(v):
        if isinstance(v, bool):
            return struct.pack("<I?", 7, v)
        if isinstance(v, int):
            return struct.pack("<II", 4, v)
        if isinstance(v, str):
            return struct.pack("<I", 8) + text(v)
        kind, pack = {int: (5, "i"), float: (6, "f"), str: (8, None)}[type(v[0])]
        items = b"".join(text(x) for x in v) if pack is None else struct.pack(f"<{len(v)}{pack}", *v)
        return struct.pack("<IIQ", 9, kind, len(v)) + items

    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields))
    return head + b"".join(text(k) + value(v) for k, v in fields.items())


def byte_level_fields(fast, pre):
    state = json.loads(fast.to_str())
    tokens = [fast.id_to_token(i) for i in range(fast.get_vocab_size())]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if i < 3 else 4 if t == "<tool>" else 1 for i, t in enumerate(tokens)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def test_gguf_byte_level_equals_the_tokenizer_it_was_written_from(tmp_path, small):
    fast = small["byte_level_fast"]()
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(byte_level_fields(fast, "gpt-2")))
    tokenizer = load_tokenizer(Source("gguf", tmp_path / "m.gguf"))
    for text in (*small["TEXTS"], "<|im_start|>user\nhi<|im_end|><tool>"):
        assert tokenizer.encode(text) == fast.encode(text).ids
    assert tokenizer.eos_token_ids == (2,) and not tokenizer.adds_bos
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hey"}]) == "hey"


@pytest.mark.parametrize(
    "pre, pieces",
    [
        ("gpt-2", ["it", "'s", "Ġ1234", "!"]),
        ("smollm", ["it", "'s", "Ġ", "1", "2", "3", "4", "!"]),
        ("llama-bpe", ["it", "'s", "Ġ", "123", "4", "!"]),
        ("qwen2", ["it", "'s", "Ġ", "1", "2", "3", "4", "!"]),
        ("tekken", ["it", "'s", "Ġ", "1", "2", "3", "4", "!"]),
        ("falcon", ["it", "'", "s", "Ġ", "123", "4", "!"]),
    ],
)
def test_how_each_family_cuts_text(tmp_path, small, pre, pieces):
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(byte_level_fields(small["byte_level_fast"](), pre)))
    cuts = gguf_tokenizer(tmp_path / "m.gguf").fast.pre_tokenizer.pre_tokenize_str("it's 1234!")
    assert [piece for piece, _ in cuts] == pieces


def test_every_pre_tokenizer_round_trips(tmp_path, small):
    fields = byte_level_fields(small["byte_level_fast"](), "")
    for pre in PRE_TOKENIZERS:
        (tmp_path / "m.gguf").write_bytes(gguf_bytes(fields | {"tokenizer.ggml.pre": pre}))
        tokenizer = gguf_tokenizer(tmp_path / "m.gguf")
        for text in small["TEXTS"]:
            assert tokenizer.decode(tokenizer.encode(text)) == text, pre


def test_gguf_sentencepiece_equals_the_model_file(tmp_path):
    write_sentencepiece(tmp_path / "tokenizer.model", PIECES)
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [p for p, _, _ in PIECES],
        "tokenizer.ggml.scores": [float(s) for _, s, _ in PIECES],
        "tokenizer.ggml.token_type": [k for _, _, k in PIECES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(fields))
    ours, other = gguf_tokenizer(tmp_path / "m.gguf"), load_tokenizer(Source("huggingface", tmp_path))
    for text in ("ab éb", " a", "", "</s>ab", "ab\nab"):
        assert ours.encode(text) == other.encode(text)
    assert ours.encode("a")[0] == 1


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tokenizer.ggml.pre": "martian"}, "'martian'.*not supported.*smollm"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 entries in tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, "merges do not fit"),
        ({"tokenizer.ggml.merges": ["zzqq"]}, "missing or damaged"),
    ],
)
def test_bad_gguf_tokenizers_are_named(tmp_path, small, change, message):
    fields = byte_level_fields(small["byte_level_fast"](), "gpt-2") | change
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(fields))
    with pytest.raises(CheckpointError, match=message):
        gguf_tokenizer(tmp_path / "m.gguf")


def test_saved_gguf_tokenizer_loads_the_same_here_and_in_transformers(tmp_path, small):
    fields = byte_level_fields(small["byte_level_fast"](), "llama-bpe")
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(fields))
    save_pretrained_from_gguf(tmp_path / "m.gguf", tmp_path / "out")
    ours, again = gguf_tokenizer(tmp_path / "m.gguf"), load_tokenizer(Source("orbax", tmp_path / "out"))
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path / "out")
    assert ours.encode("hello 1234")[0] == 0, "llama-bpe starts with bos"
    for text in (*small["TEXTS"], "<|im_end|>x"):
        assert again.encode(text) == ours.encode(text) == theirs(text)["input_ids"]
    messages = [{"role": "user", "content": "hey"}]
    assert again.apply_chat_template(messages) == theirs.apply_chat_template(messages, tokenize=False) == "hey"
    assert again.eos_token_ids == ours.eos_token_ids == (theirs.eos_token_id,)


def test_no_torch_transformers_or_jax_at_run_time(tmp_path, small):
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(byte_level_fields(small["byte_level_fast"](), "smollm")))
    code = (
        "import sys; from jaxkv.tokenization.gguf_tokenizer import gguf_tokenizer\n"
        f"t = gguf_tokenizer({str(tmp_path / 'm.gguf')!r}); assert t.decode(t.encode('hi 12')) == 'hi 12'\n"
        "print([m for m in ('torch', 'transformers', 'jax', 'sentencepiece') if m in sys.modules])"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


# The demo model: needs its file (JAXKV_DEMO_GGUF, or the cache that `--model=demo` fills)


@pytest.fixture(scope="session")
def demo():
    path = os.environ.get("JAXKV_DEMO_GGUF")
    if path is None:
        from jaxkv.core.errors import UserError
        from jaxkv.loading.resolve import resolve_model

        try:
            path = resolve_model("demo").path
        except UserError as error:
            pytest.skip(f"the demo model cannot be had: {error}")
    return gguf_tokenizer(path)


def test_demo_ids_known_from_llama_cpp(demo):
    assert demo.encode("Hello 1234 <|im_end|>") == [19556, 216, 33, 34, 35, 36, 216, 2]
    assert (demo.vocab_size, demo.eos_token_ids, demo.bos_token_id, demo.adds_bos) == (49152, (2,), 1, False)


def test_demo_chat_has_its_default_system_prompt(demo):
    text = demo.apply_chat_template([{"role": "user", "content": "hi {{ 7 * 7 }}"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi {{ 7 * 7 }}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_demo_round_trips(demo, small):
    for text in small["TEXTS"]:
        ids = demo.encode(text)
        assert demo.decode(ids) == text == demo.fast.decode(ids)
