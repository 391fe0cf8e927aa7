"""Settings of a program: flags, then environment, then a TOML table, then defaults.

Each program has one subclass of ``ProgramSettings``. A key nobody knows, in any of the three
places, is a ``ConfigError``: a misspelt setting must not be silently the default. Pure but for
reading the file: argv and the environment are arguments.

    flag          --max-num-seqs 8
    environment   PDSERVE_DECODE_MAX_NUM_SEQS=8
    TOML          --config FILE, table [decode], max_num_seqs = 8

A setting of type ``SecretStr`` has no flag, since every user of the machine can read command
lines, and its value is in no message.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from pdserve.errors import ConfigError

# What all programs share beside their own settings: PDSERVE_<name>.
SHARED_ENVIRONMENT = {"secret": "PDSERVE_SECRET", "api_key": "PDSERVE_API_KEY"}
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


class ProgramSettings(BaseSettings):
    """``program`` names the TOML table and is in the environment's prefix."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True)
    program: ClassVar[str]
    config: Path | None = Field(None, description="TOML file with one table of settings per program")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Constructing settings reads nothing by itself: ``load`` says where from."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)

    @classmethod
    def command(cls) -> str:
        """What a user types to start it."""
        return f"pdserve-{cls.program}"


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


# NoDecode: lists come as plain text here, not as JSON.
CommaSeparated = Annotated[list[str], NoDecode, BeforeValidator(_split)]

Settings = TypeVar("Settings", bound=ProgramSettings)


def load(settings: type[Settings], argv: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Raises ``ConfigError``; ``--help`` and a wrong flag exit as argparse does."""
    values = {**_from_environment(settings, environment), **vars(_parser(settings).parse_args(argv))}
    if config := values.get("config"):
        values = {**_from_toml(settings, Path(config)), **values}
    try:
        return settings(**values)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def secret_bytes(secret: SecretStr | None, host: str) -> bytes:
    """The cluster's secret. Without one only loopback may be served. Raises ``ConfigError``."""
    if secret is not None:
        return secret.get_secret_value().encode()
    if host in LOOPBACK_HOSTS:
        return b""
    raise ConfigError(f"listening on {host} needs a secret that all parts share: set PDSERVE_SECRET")


def _parser(settings: type[ProgramSettings]) -> argparse.ArgumentParser:
    prefix = _environment_prefix(settings)
    parser = argparse.ArgumentParser(
        prog=settings.command(),
        description=(settings.__doc__ or "").strip(),
        epilog=f"Every setting can also come from the environment ({prefix}...) "
        f"or from the table [{settings.program}] of the TOML file.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for name, field in settings.model_fields.items():
        if name not in SHARED_ENVIRONMENT:
            _add_flag(parser, name, field)
    return parser


def _add_flag(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    flag = "--" + name.replace("_", "-")
    text = f"{field.description}{_default_text(field.default)}".replace("%", "%%")
    if field.annotation is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    else:
        metavar = "FILE" if name == "config" else name.rsplit("_", 1)[-1].upper()
        parser.add_argument(flag, metavar=metavar, help=text)


def _default_text(default: object) -> str:
    if default is None or default == []:
        return ""
    return f" (default: {','.join(default) if isinstance(default, list) else default})"


def _environment_prefix(settings: type[ProgramSettings]) -> str:
    return f"PDSERVE_{settings.program.upper()}_"


def _from_environment(settings: type[ProgramSettings], environment: Mapping[str, str]) -> dict[str, Any]:
    prefix = _environment_prefix(settings)
    own = {
        name.removeprefix(prefix).lower(): value
        for name, value in environment.items()
        if name.startswith(prefix)
    }
    for name in own:
        if name not in settings.model_fields:
            raise ConfigError(f"{prefix}{name.upper()} in the environment is not a setting")
    source = EnvSettingsSource(settings, case_sensitive=False, env_prefix=prefix)
    source.env_vars = {name.lower(): value for name, value in environment.items()}
    shared = {
        name: environment[variable]
        for name, variable in SHARED_ENVIRONMENT.items()
        if name in settings.model_fields and environment.get(variable)
    }
    return {**shared, **source()}


def _from_toml(settings: type[ProgramSettings], file: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {file}: {error}") from error
    table = content.get(settings.program, {})
    if not isinstance(table, dict):
        raise ConfigError(f"--config {file}: {settings.program} is not a table")
    for name in table:
        if name == "config" or name not in settings.model_fields:
            raise ConfigError(f"--config {file}: [{settings.program}] {name} is not a setting")
    return table


def _explain(error: ValidationError) -> str:
    """One part per wrong value; the value itself is left out, it may be a secret."""
    return "; ".join(
        f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
        for problem in error.errors(include_url=False, include_input=False)
    )
