"""Small real tokenizers of both families, trained or built on the spot; loaded by path (runpy), not imported."""

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Fast

from jaxkv.tokenization.sentencepiece_bpe import BYTE, CONTROL, NORMAL, UNKNOWN, sentencepiece_bpe
from jaxkv.tokenization.tokenizer import Tokenizer

TEXTS = (
    "Hello world, hello again! The quick brown fox jumps over the lazy dog.",
    "  leading spaces\n\nand newlines\ttabs   runs",
    "naïve café Ελληνικά русский 你好世界 日本語 한국어",
    "emoji 👋🌍👩‍👩‍👧‍👦🇩🇪 and ❤️ done",
    "numbers 1234567890 3.14159 and code: x = {'a': [1, 2]}",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_fast():
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(TEXTS[:3], trainer)
    fast.add_tokens([AddedToken("<tool>", special=False)])
    return fast


def byte_level(chat_template=CHAT_TEMPLATE):
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    return Tokenizer(byte_level_fast(), special_tokens=special, chat_template=chat_template, add_bos=False)


def sentencepiece(add_space_prefix=True, add_bos=True):
    """Every character of the first three texts, some words, and bytes for all the rest."""
    words = [
        "he",
        "ll",
        "hell",
        "hello",
        "▁hello",
        "▁w",
        "or",
        "▁wor",
        "▁world",
        "world",
        "th",
        "▁th",
        "▁the",
        "▁▁",
        "▁1",
    ]
    characters = sorted({c for text in TEXTS[:2] for c in text.replace(" ", "▁")} - {"\n", "\t"})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words, *characters]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(words) + len(characters))]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words) + len(characters))]
    fast = sentencepiece_bpe(pieces, scores, kinds, add_space_prefix)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer(fast, special_tokens=special, add_bos=add_bos)
