"""The key that judges a directory does not come from that directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.unit.audit.trails import ask, forge, records, running, write_days
from tonle.audit import known_trails
from tonle.audit.audit_options import KEY_NAME
from tonle.audit.signing_keys import HMAC, PUBLIC_NAME, load_key
from tonle.audit.trusted_key import fingerprint_of
from tonle.audit.verify import verify
from tonle.cli.app import app
from tonle.errors import ConfigError


def tonle(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def lie(content: bytes) -> bytes:
    return content.replace(b"Hello, Dara.", b"I admit it.")


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def served(tmp_path: Path) -> Path:
    directory = tmp_path / "audit"
    with running(directory) as trail:
        ask(trail)
        ask(trail)
    return directory


@pytest.mark.parametrize("replace_secret", [False, True])
def test_a_trail_signed_again_with_another_key_is_found(served: Path, replace_secret: bool) -> None:
    assert tonle("verify", served).exit_code == 0
    real = load_key(served / KEY_NAME).fingerprint
    forge(served, edit=lie, replace_secret=replace_secret)
    assert [record["output"] for record in records(served)] == ["I admit it."] * 2
    done = tonle("verify", served)
    assert done.exit_code == 1, done.output
    assert f"key: {PUBLIC_NAME}: it holds another key" in done.stdout
    assert "signature: " in done.stdout and real in done.stderr


def test_a_forgery_is_found_without_state_by_a_fingerprint_or_a_key_file(served: Path, tmp_path: Path) -> None:
    key = shutil.copy(served / KEY_NAME, tmp_path / "real.key")
    real = load_key(Path(key)).fingerprint
    known_trails.path_of(served).unlink()
    assert verify(served, fingerprint=real).ok and not verify(served, fingerprint=real).first_use
    assert verify(served, key_file=Path(key)).ok
    forge(served, edit=lie, replace_secret=True)
    alone = verify(served)
    assert alone.ok and alone.first_use, "without anything to compare with, a forgery is consistent: that must be said"
    for options in ({"fingerprint": real}, {"key_file": Path(key)}):
        report = verify(served, **options)  # type: ignore[arg-type]
        assert "key" in {finding.problem for finding in report.findings}, options


def test_a_key_file_in_the_directory_is_no_key_from_outside(served: Path) -> None:
    known_trails.path_of(served).unlink()
    for name in (PUBLIC_NAME, KEY_NAME):
        assert verify(served, key_file=served / name).first_use


def test_first_use_is_said_and_remembered(tmp_path: Path) -> None:
    write_days(tmp_path, {"2025-01-30": 2})
    first = tonle("verify", tmp_path)
    assert first.exit_code == 0 and "Warning: first use" in first.stderr
    assert "proves nothing about its author" in words(first.stderr)
    fingerprint = load_key(tmp_path / KEY_NAME).fingerprint
    assert f"key {fingerprint}, from audit.pub in the directory itself" in words(first.stderr)
    second = tonle("verify", tmp_path)
    assert second.exit_code == 0 and "first use" not in second.stderr
    assert f"key {fingerprint}, remembered since the first verification" in words(second.stderr)
    forge(tmp_path, edit=lambda content: content.replace(b"answer 1", b"answer 2"))
    assert tonle("verify", tmp_path).exit_code == 1
    report = json.loads(tonle("verify", tmp_path, "--json").stdout)
    assert report["key"] == fingerprint and report["first_use"] is False


def test_a_trail_with_findings_is_not_remembered(tmp_path: Path) -> None:
    write_days(tmp_path, {"2025-01-30": 2})
    next(tmp_path.glob("*/chat*")).unlink()
    assert tonle("verify", tmp_path).exit_code == 1
    assert known_trails.find(tmp_path) is None


def test_a_server_pins_its_key_and_says_so(served: Path) -> None:
    known = known_trails.find(served)
    assert (
        known is not None and known.origin == "serve" and known.fingerprint == load_key(served / KEY_NAME).fingerprint
    )
    done = tonle("verify", served)
    assert "a server of this user signs with it" in words(done.stderr) and "first use" not in done.stderr
    assert "the chain has the lines noted in the state directory" in words(done.stderr)


def test_a_copy_elsewhere_is_judged_by_the_key_of_the_server(served: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(served, tmp_path / "copy")
    report = verify(copy)
    assert report.ok and not report.first_use and str(served) in report.key_from
    forge(copy, edit=lie)
    assert verify(copy).first_use, "of this key nothing is known"


def test_another_key_with_hmac_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.audit.signing_keys._has_cryptography", lambda: False)
    with running(tmp_path) as trail:
        ask(trail)
    assert load_key(tmp_path / KEY_NAME).algorithm == HMAC and not (tmp_path / PUBLIC_NAME).exists()
    assert verify(tmp_path).ok and not verify(tmp_path).first_use
    (tmp_path / KEY_NAME).write_text(f"{HMAC} {'ab' * 32}\n")
    assert "key" in {finding.problem for finding in verify(tmp_path).findings}


def test_a_secret_hmac_key_outside_the_directory_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonle.audit.signing_keys._has_cryptography", lambda: False)
    with running(tmp_path / "audit", key_file=tmp_path / "secret") as trail:
        ask(trail)
    report = verify(tmp_path / "audit")
    assert report.ok and not report.first_use


def test_a_pinned_fingerprint_keeps_a_server_with_another_key_from_starting(tmp_path: Path) -> None:
    with running(tmp_path) as trail:
        ask(trail)
    right = load_key(tmp_path / KEY_NAME).fingerprint
    with running(tmp_path, fingerprint=right.upper()):
        pass
    with pytest.raises(ConfigError, match="not the one that was given"), running(tmp_path, fingerprint="0" * 64):
        pass
    with pytest.raises(ConfigError, match="64 hex digits"), running(tmp_path, fingerprint="abc"):
        pass
    assert fingerprint_of("AB:" * 31 + "ab") == "ab" * 32


def test_a_server_with_another_key_says_so_and_keeps_the_pin(served: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = known_trails.find(served)
    forge(served, edit=lie, replace_secret=True)
    with running(served) as trail:
        ask(trail)
    assert known_trails.find(served) == before
    assert "is not the one known since" in caplog.text and "tonle audit trust" in caplog.text
    assert tonle("verify", served).exit_code == 1
    done = tonle("trust", served)
    assert done.exit_code == 0 and "forgotten: key" in done.stderr, done.output
    assert tonle("verify", served).exit_code == 0


def test_trust_takes_only_the_key_that_is_named(served: Path) -> None:
    wrong = tonle("trust", served, "--fingerprint", "0" * 64)
    assert wrong.exit_code == 1 and "not the one that was given" in wrong.stderr
    assert tonle("trust", served, "--fingerprint", load_key(served / KEY_NAME).fingerprint).exit_code == 0
    assert tonle("trust", served / "nowhere").exit_code == 1


def test_what_is_known_and_cannot_be_read_is_an_error_and_not_a_first_use(served: Path) -> None:
    known_trails.path_of(served).write_text("{")
    done = tonle("verify", served)
    assert done.exit_code == 1 and "cannot be read" in done.stderr and "tonle audit trust" in done.stderr
    assert tonle("trust", served).exit_code == 0
    assert tonle("verify", served).exit_code == 0


def test_a_user_without_a_place_for_state_can_verify(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nothing")
    done = tonle("verify", served)
    assert done.exit_code == 0 and "first use" in done.stderr and "cannot be remembered" in done.stderr


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_the_public_key_is_not_written_through_what_has_its_name(tmp_path: Path, kind: str) -> None:
    import os

    victim = tmp_path / "victim"
    victim.write_text("precious")
    directory = tmp_path / "audit"
    directory.mkdir()
    if kind == "link":
        (directory / PUBLIC_NAME).symlink_to(victim)
    else:
        os.mkfifo(directory / PUBLIC_NAME)
    write_days(directory, {"2025-01-30": 1})
    assert victim.read_text() == "precious"
    assert load_key(directory / PUBLIC_NAME).fingerprint == load_key(directory / KEY_NAME).fingerprint


def test_the_fingerprint_has_all_the_bits(tmp_path: Path) -> None:
    write_days(tmp_path, {"2025-01-30": 1})
    head: dict[str, Any] = json.loads((tmp_path / "2025-01-30" / "head.json").read_text())
    assert len(head["key"]) == 64
