"""One set of real processes for the tests that leave them whole."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.model_folder import save_model_folder
from tests.support.processes import Processes, open_processes
from tests.support.tiny_models import tiny_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("llama", max_context_tokens=4096)  # so that a request can outlast any fault
    return save_model_folder(model, tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def processes(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with open_processes(model_folder, tmp_path_factory.mktemp("logs")) as running:
        yield running
