import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import ConfigError
from pdserve.model_card import read_model_card

CONFIG = {"vocab_size": 100, "max_position_embeddings": 512, "eos_token_id": 2, "bos_token_id": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "config.json", CONFIG)
    write(tmp_path, "tokenizer.json", {})
    return tmp_path


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content))


def test_a_bare_folder_is_enough(folder: Path) -> None:
    card = read_model_card(folder)
    assert (card.name, card.vocab_size, card.max_context_tokens) == (folder.name, 100, 512)
    assert card.eos_token_ids == {2}
    assert card.bos_token_id == 1
    assert card.chat_template is None
    assert card.special_tokens == {}


@pytest.mark.parametrize(("eos", "expected"), [(7, {7}), ([7, 8], {7, 8}), (None, set())])
def test_the_generation_config_wins(folder: Path, eos: Any, expected: set[int]) -> None:
    write(folder, "generation_config.json", {"eos_token_id": eos})
    assert read_model_card(folder).eos_token_ids == expected


def test_a_generation_config_without_eos_leaves_the_models(folder: Path) -> None:
    write(folder, "generation_config.json", {"temperature": 1.0})
    assert read_model_card(folder).eos_token_ids == {2}


def test_the_text_part_of_a_multimodal_config_counts(folder: Path) -> None:
    write(folder, "config.json", {"text_config": CONFIG, "vision_config": {}})
    assert read_model_card(folder).vocab_size == 100


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ plain }}", "{{ plain }}"),
        ([{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "tool", "template": "t"}], None),
    ],
)
def test_a_chat_template_may_be_named(folder: Path, template: Any, expected: str | None) -> None:
    write(folder, "tokenizer_config.json", {"chat_template": template})
    assert read_model_card(folder).chat_template == expected


def test_a_template_file_wins(folder: Path) -> None:
    write(folder, "tokenizer_config.json", {"chat_template": "old"})
    (folder / "chat_template.jinja").write_text("new")
    assert read_model_card(folder).chat_template == "new"


def test_special_tokens_are_strings_however_they_were_saved(folder: Path) -> None:
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}
    write(folder, "tokenizer_config.json", tokens)
    assert read_model_card(folder).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        read_model_card(folder)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("{", "is not JSON"), ("[]", "does not hold a JSON object"), ("{}", "has no vocab_size")],
)
def test_a_broken_config_is_explained(folder: Path, content: str, complaint: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        read_model_card(folder)
