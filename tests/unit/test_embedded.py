from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.model import embedded


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
    monkeypatch.setattr(embedded, "_save_as_safetensors", save_a_file)
    folder = embedded.resolve_model(model)
    assert folder == cache / embedded.EMBEDDED_NAME
    monkeypatch.delattr(embedded, "_save_as_safetensors")
    assert embedded.resolve_model(model) == folder
    assert list(cache.iterdir()) == [folder]


def test_a_failed_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path) -> None:
        save_a_file(source, target)
        raise OSError("no space left on device")

    monkeypatch.setattr(embedded, "_save_as_safetensors", fail)
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

    monkeypatch.setattr(embedded, "_save_as_safetensors", lose_the_race)
    folder = embedded.embedded_model_path()
    assert (folder / "config.json").read_text() == "the winner's"
    assert list(cache.iterdir()) == [folder]


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert embedded.resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["/nowhere/model", "./nowhere", "~/nowhere-at-all", "nothing", "a/b/c"])
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        embedded.resolve_model(model)


def test_a_hub_id_that_cannot_be_had_is_explained() -> None:
    with pytest.raises(ConfigError, match="cannot be downloaded"):
        embedded.resolve_model("owner/not a name")
