from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field, SecretStr

from pdserve.config import CommaSeparated, ProgramSettings, load, secret_bytes
from pdserve.errors import ConfigError


class KettleSettings(ProgramSettings):
    """Boils water."""

    program: ClassVar[str] = "kettle"
    litres: int = Field(1, ge=1, description="how much")
    loud: bool = Field(True, description="whether to whistle at 100 %")
    cups: CommaSeparated = Field([], description="where to pour")
    secret: SecretStr | None = Field(None, description="shared by all parts")


def write_toml(folder: Path, text: str) -> str:
    file = folder / "pdserve.toml"
    file.write_text(text)
    return str(file)


def test_flags_win_over_environment_over_toml_over_defaults(tmp_path: Path) -> None:
    file = write_toml(tmp_path, "[kettle]\nlitres = 2\nloud = false\n[other]\nanything = 1\n")
    environment = {"PDSERVE_KETTLE_LITRES": "3"}
    assert load(KettleSettings, [], {}).litres == 1
    assert load(KettleSettings, ["--config", file], {}).litres == 2
    assert load(KettleSettings, ["--config", file], environment).litres == 3
    settings = load(KettleSettings, ["--config", file, "--litres", "4"], environment)
    assert settings.litres == 4
    assert settings.loud is False


def test_the_toml_file_can_be_named_in_the_environment(tmp_path: Path) -> None:
    file = write_toml(tmp_path, "[kettle]\nlitres = 2\n")
    assert load(KettleSettings, [], {"PDSERVE_KETTLE_CONFIG": file}).litres == 2


def test_a_list_is_given_with_commas_or_as_a_toml_array(tmp_path: Path) -> None:
    file = write_toml(tmp_path, '[kettle]\ncups = ["a:1", "b:2"]\n')
    assert load(KettleSettings, ["--config", file], {}).cups == ["a:1", "b:2"]
    assert load(KettleSettings, ["--cups", "a:1, b:2,"], {}).cups == ["a:1", "b:2"]
    assert load(KettleSettings, ["--cups", ""], {}).cups == []


def test_a_switch_can_be_turned_off_by_flag_and_by_environment() -> None:
    assert load(KettleSettings, ["--no-loud"], {}).loud is False
    assert load(KettleSettings, [], {"PDSERVE_KETTLE_LOUD": "false"}).loud is False


def test_an_unknown_flag_ends_with_code_2_and_a_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        load(KettleSettings, ["--litre", "3"], {})
    assert "unrecognized arguments: --litre 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("toml", "complaint"),
    [
        ("[kettle]\nlitre = 3\n", r"\[kettle\] litre is not a setting"),
        ("[kettle]\nconfig = 'x'\n", r"\[kettle\] config is not a setting"),
        ("kettle = 3\n", "kettle is not a table"),
        ("[kettle\n", "--config"),
    ],
)
def test_what_a_toml_file_should_not_say_is_refused(tmp_path: Path, toml: str, complaint: str) -> None:
    file = write_toml(tmp_path, toml)
    with pytest.raises(ConfigError, match=complaint):
        load(KettleSettings, ["--config", file], {})


def test_a_missing_toml_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere/x\.toml"):
        load(KettleSettings, ["--config", "/nowhere/x.toml"], {})


def test_an_unknown_key_of_this_program_in_the_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="PDSERVE_KETTLE_LITRE in the environment is not a setting"):
        load(KettleSettings, [], {"PDSERVE_KETTLE_LITRE": "3", "PDSERVE_OTHER_CUPS": "fine"})


def test_a_wrong_value_is_explained_without_being_repeated() -> None:
    with pytest.raises(ConfigError, match="litres: Input should be greater than or equal to 1") as caught:
        load(KettleSettings, ["--litres", "-77"], {})
    assert "-77" not in str(caught.value)


def test_settings_cannot_be_changed() -> None:
    settings = load(KettleSettings, [], {})
    with pytest.raises(ValueError, match="frozen"):
        settings.litres = 3


def test_the_secret_comes_from_the_environment_and_shows_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    settings = load(KettleSettings, [], {"PDSERVE_SECRET": "sesame"})
    assert secret_bytes(settings.secret, "0.0.0.0") == b"sesame"
    assert "sesame" not in repr(settings)
    with pytest.raises(SystemExit):
        load(KettleSettings, ["--secret", "sesame"], {})


def test_without_a_secret_only_loopback_may_be_served() -> None:
    assert secret_bytes(None, "127.0.0.1") == b""
    with pytest.raises(ConfigError, match="PDSERVE_SECRET"):
        secret_bytes(None, "0.0.0.0")


def test_help_names_every_setting_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        load(KettleSettings, ["--help"], {})
    text = capsys.readouterr().out
    assert "pdserve-kettle" in text
    assert "how much (default: 1)" in text
    assert "whistle at 100 %" in text
    assert "PDSERVE_KETTLE_" in text
