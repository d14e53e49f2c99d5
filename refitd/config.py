"""Settings of the daemon and of its clients.

Daemon: command line > environment (REFITD_*, nested by "__") > TOML file > default; frozen; a key that does not exist
fails at start, so that a typo never means "default". Clients: a few values, read from the environment only when
`load_client_settings` is called. Read by refitd.cli and, for the client part, by refit_client.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from refitd.domain.errors import Invalid
from refitd.rpc.channel import DEFAULT_PORT, parse_address

DEFAULT_LISTEN = f"127.0.0.1:{DEFAULT_PORT}"
DEFAULT_METRICS_LISTEN = "127.0.0.1:9464"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TlsSettings(_Section):
    """TLS of the gRPC port."""

    cert_file: Path | None = None
    """PEM file with the server's certificate chain; unset: no TLS."""
    key_file: Path | None = None
    """PEM file with its private key."""

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")
        return self


class AuthSettings(_Section):
    """Who may call."""

    token_file: Path | None = None
    """File with the bearer token that every call must carry; read again when it changes. Unset: no token is asked."""


class LimitSettings(_Section):
    """What one caller may ask of the daemon."""

    max_deadline_seconds: float = Field(default=3600.0, gt=0)
    """Longer deadlines of unary calls are cut to this."""
    max_message_bytes: int = Field(default=4 * 1024 * 1024, ge=1024 * 1024)
    """Largest request and response. Layouts travel in chunks of 512 KiB, weights not at all."""
    max_pending_requests: int = Field(default=100_000, ge=1000)
    """Calls that may wait for acceptance; a fleet that reconnects after a restart is a burst of thousands."""
    max_concurrent_streams: int = Field(default=20_000, ge=100)
    """Calls in flight on one connection."""


class AgentSettings(_Section):
    """Liveness of agents."""

    default_ttl_seconds: float = Field(default=15.0, gt=0)
    """How long an agent lives after its watch has ended, when it does not say."""
    max_ttl_seconds: float = Field(default=300.0, gt=0)
    """Longer ttls are cut to this: a dead agent's leases hold versions for as long."""


class KeepaliveSettings(_Section):
    """HTTP/2 pings: how a peer that is frozen or cut off, and not closed, is found."""

    time_seconds: float = Field(default=10.0, ge=1)
    """A silent client is pinged after this."""
    timeout_seconds: float = Field(default=10.0, ge=1)
    """A client that does not answer a ping within this is dropped, and its watch ends."""
    min_client_ping_seconds: float = Field(default=20.0, ge=0.1)
    """Clients that ping more often than this without data are told to go away."""


class LogSettings(_Section):
    """Logs on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is written."""
    format: Literal["auto", "json", "console"] = "auto"
    """"auto": console on a terminal, JSON lines otherwise."""
    access: bool = False
    """One line per call at level info; failures are always logged."""


class Settings(BaseSettings):
    """All settings of `refitd serve`."""

    model_config = SettingsConfigDict(
        env_prefix="REFITD_", env_nested_delimiter="__", frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    data_dir: Path = Field(default_factory=lambda: default_data_dir())
    """Where the state lies; one daemon per directory. Default: $XDG_STATE_HOME/refitd or ~/.local/state/refitd."""
    listen: str = DEFAULT_LISTEN
    """host:port of the gRPC server; port 0 takes a free one."""
    metrics_listen: str = DEFAULT_METRICS_LISTEN
    """host:port of the HTTP server of /metrics; port 0 takes a free one; empty: none."""
    insecure: bool = False
    """Allows a listen address other than loopback without TLS."""
    reflection: bool = True
    """Serves gRPC reflection, for grpcurl and the like."""
    drain_seconds: float = Field(default=5.0, ge=0)
    """After SIGTERM, calls in flight have this long to end."""
    tls: TlsSettings = TlsSettings()
    auth: AuthSettings = AuthSettings()
    limits: LimitSettings = LimitSettings()
    agents: AgentSettings = AgentSettings()
    keepalive: KeepaliveSettings = KeepaliveSettings()
    log: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _reachable_means_protected(self) -> Self:
        try:
            address = parse_address(self.listen, listen=True)
            if self.metrics_listen:
                parse_address(self.metrics_listen, listen=True)
        except Invalid as error:
            raise ValueError(f"{error.message}; {error.advice}") from None
        if not address.is_loopback and self.tls.cert_file is None and not self.insecure:
            raise ValueError(
                f"listening on {address}, which others can reach, needs TLS: set tls.cert_file and tls.key_file, or "
                "say --insecure if the network itself is trusted"
            )
        if self.agents.default_ttl_seconds > self.agents.max_ttl_seconds:
            raise ValueError("agents.default_ttl_seconds is above agents.max_ttl_seconds")
        return self


def default_data_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """$XDG_STATE_HOME/refitd, else ~/.local/state/refitd."""
    state_home = environ.get("XDG_STATE_HOME", "")
    return (Path(state_home) if state_home else Path.home() / ".local" / "state") / "refitd"


def load_settings(config_file: Path | None = None, overrides: Mapping[str, object] | None = None) -> Settings:
    """The daemon's settings, from all four places. Reads the environment.

    Args:
        config_file: TOML file; None: none is read.
        overrides: What the command line says, by field name; nested sections as mappings. None values are left out.

    Raises:
        Invalid: the file cannot be read, or a key or a value is wrong; all of them are named.
    """
    file_values = _read_toml(config_file) if config_file is not None else {}

    class LoadedSettings(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=file_values)

    try:
        # Through a callable: the type checker would otherwise demand each field's type of an open mapping.
        build: Callable[..., Settings] = LoadedSettings
        return build(**_without_none(overrides or {}))
    except ValidationError as error:
        found = [(".".join(str(part) for part in e["loc"]), _said(e["msg"])) for e in error.errors()]
        raise Invalid(
            "; ".join(f"{field}: {said}" if field else said for field, said in found),
            advice="see `refitd config schema` for all settings",
            field=",".join(field for field, _ in found),
        ) from None
    except SettingsError as error:  # an environment variable of a section that is no JSON
        raise Invalid(str(error), advice="nested settings are set one by one, e.g. REFITD_LOG__LEVEL=debug") from None


def _said(message: str) -> str:
    return message.removeprefix("Value error, ").replace("Extra inputs are not permitted", "there is no such setting")


def _without_none(values: Mapping[str, object]) -> dict[str, object]:
    kept: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            inner = _without_none(value)
            if inner:
                kept[key] = inner
        elif value is not None:
            kept[key] = value
    return kept


def _read_toml(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise Invalid(f"config file {path} cannot be read: {error.strerror}", field="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"config file {path} is no TOML: {error}", field="config") from None


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How a client reaches the daemon."""

    server: str = DEFAULT_LISTEN
    """host:port."""
    token_file: Path | None = None
    """File with the bearer token."""
    ca: Path | None = None
    """PEM file with the certificate authority; None: no TLS."""
    serve_on: str | None = None
    """host:port where published weights are served to other hosts; None: only this host reads."""
    transports: tuple[str, ...] = ()
    """How weights are read, best first; empty: the default."""


def load_client_settings(
    server: str | None = None,
    *,
    token_file: Path | None = None,
    ca: Path | None = None,
    serve_on: str | None = None,
    transports: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> ClientSettings:
    """Arguments first, then REFITD_SERVER, REFITD_TOKEN_FILE, REFITD_CA, REFITD_SERVE_ON and REFITD_TRANSPORTS (names
    with commas), then 127.0.0.1:7077 without TLS, serving nobody else.

    Raises `Invalid` for a malformed address.
    """
    address = server or environ.get("REFITD_SERVER", "") or DEFAULT_LISTEN
    token_text, ca_text = environ.get("REFITD_TOKEN_FILE", ""), environ.get("REFITD_CA", "")
    served, names = serve_on or environ.get("REFITD_SERVE_ON", ""), environ.get("REFITD_TRANSPORTS", "")
    return ClientSettings(
        str(parse_address(address)),
        token_file or (Path(token_text) if token_text else None),
        ca or (Path(ca_text) if ca_text else None),
        str(parse_address(served, listen=True)) if served else None,
        tuple(transports) or tuple(name.strip() for name in names.split(",") if name.strip()),
    )
