"""Small tokenizers of the two kinds that matter, and a model folder that holds one."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from pdserve.model_card import ModelCard, read_model_card

END = "<|im_end|>"
CHAT_TEMPLATE = """{% for message in messages -%}
{% if message['role'] == 'robot' %}{{ raise_exception('no robots here') }}{% endif -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "naïve café 日本語 日本 🎉🎉",
    "one two three DEFGHIJ",
] * 5


@functools.cache
def byte_level() -> Tokenizer:
    """Every byte is a token, so every character can be cut."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.add_tokens(["<think>"])
    return tokenizer


@functools.cache
def sentencepiece() -> Tokenizer:
    """As Llama's: words begin with a marked space, unknown characters fall back to bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "the", "▁a", "a", "b", "日", "▁▁", ","]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in ("<s>", "</s>")])
    return tokenizer


def id_of(tokenizer: Tokenizer, piece: str) -> int:
    token_id = tokenizer.token_to_id(piece)
    assert token_id is not None, piece
    return token_id


def write_model_folder(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    max_context_tokens: int = 256,
) -> ModelCard:
    """What the router reads of a model; there are no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = tokenizer.get_vocab_size()
    config = {
        "vocab_size": vocab_size + 8,  # as models do, more logits than tokens
        "max_position_embeddings": max_context_tokens,
        "eos_token_id": tokenizer.token_to_id(END) or tokenizer.token_to_id("</s>"),
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return read_model_card(folder)
