from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.model import embedded, gguf_file


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    return tmp_path


def save_a_file(source: Path, target: Path) -> None:
    del source
    (target / "config.json").write_text("{}")


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDSERVE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert embedded.default_cache_dir() == Path("/x/pdserve/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert embedded.default_cache_dir() == Path.home() / ".cache/pdserve/models"
    monkeypatch.setenv("PDSERVE_CACHE", "/y")
    assert embedded.default_cache_dir() == Path("/y")


@pytest.mark.parametrize("model", [None, "embedded"])
def test_the_embedded_model_is_made_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, model: str | None
) -> None:
    monkeypatch.setattr(gguf_file, "save_as_safetensors", save_a_file)
    folder = embedded.resolve_model(model)
    assert folder == cache / embedded.EMBEDDED_NAME
    monkeypatch.delattr(gguf_file, "save_as_safetensors")
    assert embedded.resolve_model(model) == folder
    assert list(cache.iterdir()) == [folder]


def test_a_failed_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path) -> None:
        save_a_file(source, target)
        raise OSError("no space left on device")

    monkeypatch.setattr(gguf_file, "save_as_safetensors", fail)
    with pytest.raises(OSError, match="no space left"):
        embedded.embedded_model_path()
    assert list(cache.iterdir()) == []


def test_the_slower_of_two_conversions_takes_the_quicker_ones_result(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_the_race(source: Path, target: Path) -> None:
        save_a_file(source, target)
        winner = cache / embedded.EMBEDDED_NAME
        winner.mkdir()
        (winner / "config.json").write_text("the winner's")

    monkeypatch.setattr(gguf_file, "save_as_safetensors", lose_the_race)
    folder = embedded.embedded_model_path()
    assert (folder / "config.json").read_text() == "the winner's"
    assert list(cache.iterdir()) == [folder]


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert embedded.resolve_model(str(tmp_path)) == tmp_path


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(
    cache: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "save_as_safetensors", save_a_file)
    file = tmp_path_factory.mktemp("models") / "My-Model.gguf"
    file.write_bytes(b"GGUF")
    folder = embedded.resolve_model(str(file))
    assert folder.name == "My-Model"
    assert folder.parent.parent == cache
    assert embedded.resolve_model(str(file)) == folder
    file.write_bytes(b"GGUF, another")
    assert embedded.resolve_model(str(file)) != folder


def test_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="must be a GGUF"):
        embedded.resolve_model(str(file))


def test_what_only_calls_itself_a_gguf_is_refused(
    cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("models") / "bad.gguf"
    file.write_bytes(b"not a GGUF at all, but long enough for its header")
    with pytest.raises(ConfigError, match="no GGUF that transformers can read"):
        embedded.resolve_model(str(file))
    assert not list(cache.glob("*/bad"))


@pytest.mark.parametrize(
    "model", ["/nowhere/model", "./nowhere", "~/nowhere-at-all", "nothing", "a/b/c", "a/b.gguf"]
)
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        embedded.resolve_model(model)


def test_a_hub_id_that_cannot_be_had_is_explained() -> None:
    with pytest.raises(ConfigError, match="cannot be downloaded"):
        embedded.resolve_model("owner/not a name")
