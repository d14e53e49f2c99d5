"""Settings: precedence, refusal of typos, and addresses that others can reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from refitd.config import default_data_dir, load_client_settings, load_settings
from refitd.domain.errors import Invalid


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REFITD_LISTEN", "REFITD_DATA_DIR", "REFITD_LOG__LEVEL", "REFITD_SERVER", "REFITD_CA"):
        monkeypatch.delenv(name, raising=False)


def test_command_line_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "refitd.toml"
    file.write_text('[limits]\nmax_deadline_seconds = 1.0\nmax_pending_requests = 5000\n[log]\nlevel = "error"\n')
    assert load_settings().limits.max_deadline_seconds == 3600.0
    assert load_settings(file).limits.max_deadline_seconds == 1.0
    monkeypatch.setenv("REFITD_LIMITS__MAX_DEADLINE_SECONDS", "2")
    assert load_settings(file).limits.max_deadline_seconds == 2.0
    settings = load_settings(file, {"limits": {"max_deadline_seconds": 3.0}, "log": {"level": None}})
    assert settings.limits.max_deadline_seconds == 3.0
    # What a stronger place does not say stays as the weaker one said it.
    assert settings.limits.max_pending_requests == 5000
    assert settings.log.level == "error"


def test_an_unknown_key_in_the_file_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "refitd.toml"
    file.write_text("[agents]\ndefault_tll_seconds = 3\n")
    with pytest.raises(Invalid, match=r"agents\.default_tll_seconds: there is no such setting"):
        load_settings(file)


def test_an_unknown_key_of_a_section_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFITD_LOG__LEVLE", "debug")
    with pytest.raises(Invalid, match="levle"):
        load_settings()


def test_a_config_file_that_is_missing_or_broken_is_said(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="cannot be read"):
        load_settings(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("listen = ")
    with pytest.raises(Invalid, match="no TOML"):
        load_settings(broken)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings().listen = "127.0.0.1:1"  # type: ignore[misc]


@pytest.mark.parametrize("listen", ["0.0.0.0:7077", "10.0.0.1:7077", "[::]:7077", "refit.example:7077"])
def test_an_address_that_others_reach_needs_tls_or_the_word_insecure(listen: str) -> None:
    with pytest.raises(Invalid, match="--insecure"):
        load_settings(None, {"listen": listen})
    assert load_settings(None, {"listen": listen, "insecure": True}).listen == listen
    tls = {"cert_file": Path("cert.pem"), "key_file": Path("key.pem")}
    assert load_settings(None, {"listen": listen, "tls": tls}).tls.cert_file == Path("cert.pem")


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.3.2.1:7077", "[::1]:7077", "localhost:7077"])
def test_loopback_needs_no_tls(listen: str) -> None:
    assert load_settings(None, {"listen": listen}).listen == listen


def test_half_a_tls_configuration_is_refused() -> None:
    with pytest.raises(Invalid, match="go together"):
        load_settings(None, {"tls": {"cert_file": Path("cert.pem")}})


def test_a_malformed_address_is_refused() -> None:
    with pytest.raises(Invalid, match="several colons"):
        load_settings(None, {"listen": "::1:7077"})


def test_state_lies_under_xdg_state_home() -> None:
    assert default_data_dir({"XDG_STATE_HOME": "/var/state"}) == Path("/var/state/refitd")
    assert default_data_dir({}) == Path.home() / ".local/state/refitd"


def test_client_settings_take_arguments_before_the_environment() -> None:
    environ = {"REFITD_SERVER": "daemon:1", "REFITD_TOKEN_FILE": "/token", "REFITD_CA": "/ca.pem"}
    assert load_client_settings(environ={}).server == "127.0.0.1:7077"
    settings = load_client_settings(environ=environ)
    assert (settings.server, settings.token_file, settings.ca) == ("daemon:1", Path("/token"), Path("/ca.pem"))
    assert load_client_settings("other:2", ca=Path("/mine.pem"), environ=environ).server == "other:2"
    with pytest.raises(Invalid, match="scheme"):
        load_client_settings("http://daemon:1", environ={})
