"""`tonle keys` on a file of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.unit.cli.terminal import tonle
from tonle.gateway.admin import shown_key
from tonle.gateway.api_keys.key import draw


def test_create_list_revoke(tmp_path: Path) -> None:
    place = ("--state-db", str(tmp_path / "state.db"))
    assert "No keys yet" in tonle("keys", "list", *place).stderr
    assert json.loads(tonle("keys", "list", "--json", *place).stdout) == {"keys": []}
    refused = tonle("keys", "revoke", "none", *place)
    assert refused.returncode == 1 and "no file" in refused.stderr
    assert not (tmp_path / "state.db").exists(), "to look must not create it"
    made = tonle(
        "keys",
        "create",
        "--name",
        "alice [laptop]",
        "--scope",
        "priority",
        "--scope",
        "admin",
        "--tokens-per-day",
        "9",
        *place,
    )
    secret = made.stdout.strip()
    assert re.fullmatch(r"tonle-\S{43}", secret) and secret not in made.stderr
    (key,) = json.loads(tonle("keys", "list", "--json", *place).stdout)["keys"]
    fields = shown_key(draw("any")[0], {})
    assert key.keys() == fields.keys() and key["limits"].keys() == fields["limits"].keys(), "as GET /admin/keys"
    assert (key["name"], key["scopes"], key["limits"]["tokens_per_day"]) == ("alice [laptop]", ["priority", "admin"], 9)
    assert (key["revoked"], key["tokens_today"]) == (None, 0)
    assert f"Revoked key {key['id']} (alice [laptop])" in tonle("keys", "revoke", key["id"], *place).stderr
    listed = tonle("keys", "list", *place).stdout
    assert "alice [laptop]" in listed and "revoked" in listed and secret not in listed


def test_wrong_words(tmp_path: Path) -> None:
    place = ("--state-db", str(tmp_path / "state.db"))
    wrong = tonle("keys", "create", "--name", "x", "--scope", "fly", *place, COLUMNS="160")
    assert (
        wrong.returncode == 2
        and "'--scope': 'fly' is not one of 'models', 'metrics', 'priority', 'gateway', 'dashboard', 'admin'"
        in wrong.stderr
    )
    assert tonle("keys", "create", *place).returncode == 2
    assert tonle("keys", "create", "--name", "x", *place).returncode == 0
    assert "there is no key 'nope'" in tonle("keys", "revoke", "nope", *place).stderr
    assert tonle("keys", "list", "--name", "x", *place).returncode == 2, "an option of another subcommand"
