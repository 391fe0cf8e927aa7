"""Settings of a program: flags, then environment, then a TOML table, then defaults.

Each program has one subclass of ``ProgramSettings``. A key nobody knows, in any of the three
places, is a ``ConfigError``: a misspelt setting must not be silently the default. Pure: argv
and the environment are arguments.

    flag          --max-num-seqs 8
    environment   PDSERVE_DECODE_MAX_NUM_SEQS=8
    TOML          --config FILE, table [decode], max_num_seqs = 8
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BeforeValidator, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from pdserve.errors import ConfigError

# Known to every program beside its own settings.
SHARED_ENVIRONMENT = {"secret": "PDSERVE_SECRET"}


class ProgramSettings(BaseSettings):
    model_config = SettingsConfigDict(extra="forbid", frozen=True)
    program: ClassVar[str]

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, **sources: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """``load`` has merged the sources already."""
        del settings_cls, sources
        return (init_settings,)


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


# NoDecode: pydantic-settings would want JSON.
CommaSeparated = Annotated[list[str], NoDecode, BeforeValidator(_split)]

Settings = TypeVar("Settings", bound=ProgramSettings)


def load(settings: type[Settings], argv: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Raises ``ConfigError``; ``--help`` and a wrong flag exit as argparse does."""
    flags = vars(_parser(settings).parse_args(argv))
    config_file = flags.pop("config", None)
    values = {
        **(_from_toml(settings, Path(config_file)) if config_file else {}),
        **_from_environment(settings, environment),
        **flags,
    }
    try:
        return settings(**values)
    except ValidationError as error:
        raise ConfigError(_explain(settings, error)) from None


def secret_bytes(secret: SecretStr | None, host: str) -> bytes:
    """The cluster's secret. Without one only loopback may be served. Raises ``ConfigError``."""
    if secret is not None:
        return secret.get_secret_value().encode()
    if host in ("127.0.0.1", "localhost", "::1"):
        return b""
    raise ConfigError(
        f"listening on {host} needs a secret that all parts share: set PDSERVE_SECRET (not a flag: flags are seen)"
    )


def _parser(settings: type[ProgramSettings]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"pdserve-{settings.program}",
        description=(settings.__doc__ or "").strip(),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help=f"TOML file; its table [{settings.program}] is read")
    for name, field in settings.model_fields.items():
        if name in SHARED_ENVIRONMENT:
            continue  # never on a command line, which every user of the machine can read
        flag = "--" + name.replace("_", "-")
        text = f"{field.description or ''} (default: {field.default})".replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(flag, metavar="VALUE", help=text)
    return parser


def _from_environment(settings: type[ProgramSettings], environment: Mapping[str, str]) -> dict[str, str]:
    prefix = f"PDSERVE_{settings.program.upper()}_"
    values = {
        name.removeprefix(prefix).lower(): value
        for name, value in environment.items()
        if name.startswith(prefix)
    }
    for name in values:
        if name not in settings.model_fields:
            raise ConfigError(f"environment: {prefix}{name.upper()} is not a setting of pdserve-{settings.program}")
    for name, variable in SHARED_ENVIRONMENT.items():
        if name in settings.model_fields and environment.get(variable):
            values.setdefault(name, environment[variable])
    return values


def _from_toml(settings: type[ProgramSettings], file: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {file}: {error}") from error
    table = content.get(settings.program, {})
    for name in table:
        if name not in settings.model_fields:
            raise ConfigError(f"--config {file}: [{settings.program}] {name} is not a setting")
    return dict(table)


def _explain(settings: type[ProgramSettings], error: ValidationError) -> str:
    """One line per wrong value; the value itself is left out, it may be a secret."""
    lines = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
    return f"pdserve-{settings.program}: " + "; ".join(lines)
