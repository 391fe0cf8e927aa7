"""Chat templates are rendered as the models' authors meant, and cannot harm the router."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.errors import ConfigError, RequestError
from pdserve_router.chat_template import ChatTemplate
from tests.support.tiny_tokenizers import CHAT_TEMPLATE, byte_level, write_model_folder

USER = [{"role": "user", "content": "hi"}]


def template(folder: Path, text: str | None) -> ChatTemplate:
    return ChatTemplate(write_model_folder(folder, byte_level(), chat_template=text))


def test_messages_end_open_for_the_assistant(tmp_path: Path) -> None:
    rendered = template(tmp_path, CHAT_TEMPLATE).render(USER)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_refuses_is_the_clients_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no robots here") as caught:
        template(tmp_path, CHAT_TEMPLATE).render([{"role": "robot", "content": ""}])
    assert caught.value.param == "messages"


def test_a_model_without_template_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="/v1/completions"):
        template(tmp_path, None).render(USER)


def test_a_broken_template_is_the_operators_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="broken"):
        template(tmp_path, "{% if %}")


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<é>"}]'),
        ("{{ eos_token }}", "<|im_end|>"),
        ("{% generation %}a{% endgeneration %}", "a"),
        ("{% for m in messages %}x{% break %}{% endfor %}", "x"),
        ("{{ tools is none }}", "True"),
        ("  {% if true %}\nyes\n  {% endif %}\n", "yes\n"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_what_templates_of_transformers_may_use(tmp_path: Path, text: str, rendered: str) -> None:
    assert template(tmp_path, text).render([{"role": "user", "content": "<é>"}]) == rendered


def test_a_template_cannot_leave_the_sandbox(tmp_path: Path) -> None:
    with pytest.raises(RequestError):
        template(tmp_path, "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}").render(USER)
