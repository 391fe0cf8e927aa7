"""A tiny model as a folder that all programs can load: weights, and a tokenizer of plain words.

Token 17 is the word ``t17``, so text and token ids can be told from each other by eye.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel

from tests.support.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}t7{% endif %}"
)


def save_model_folder(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word(i): i for i in range(VOCAB_SIZE)}, unk_token=word(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": word(EOS_TOKEN_ID), "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def word(token_id: int) -> str:
    return f"t{token_id}"


def text_of(token_ids: list[int]) -> str:
    return " ".join(map(word, token_ids))


def token_ids_of(text: str) -> list[int]:
    return [int(part[1:]) for part in text.split()]
