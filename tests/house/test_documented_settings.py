"""Settings in the documents are those a file, a variable or a flag may name."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

from tonle.config import load_settings as load
from tonle.config.audit import MIDDLEWARE_SETTINGS
from tonle.config.deploy import DEPLOY_SETTINGS
from tonle.config.engine import EngineConfig
from tonle.config.gateway import SETTINGS as GATEWAY_SETTINGS
from tonle.config.ray import RAY_SETTINGS
from tonle.config.routing import ArmConfig, BackendConfig, ExperimentConfig, ShadowConfig
from tonle.config.serve import SETTINGS as SERVE_SETTINGS
from tonle.config.vllm import VLLM_FLAGS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SETTINGS = [*GATEWAY_SETTINGS.values(), *SERVE_SETTINGS.values(), *MIDDLEWARE_SETTINGS.values()]
LIST_KEYS = {
    key for item in (BackendConfig, ArmConfig, ExperimentConfig, ShadowConfig) for key in item.__struct_fields__
}

IN_PYTHON = "library.md"  # about classes, whose fields are called as they are inside the code
NO_SETTINGS = {"use_cache"}  # a field of requests


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_have_their_public_names(page: Path) -> None:
    text = page.read_text()
    every = [*SETTINGS, *DEPLOY_SETTINGS.values(), *RAY_SETTINGS.values()]
    inside = {setting.field: setting.name for setting in every if setting.field != setting.name}
    for word in re.findall(r"`([a-z0-9_]+)`", text) if page.name != IN_PYTHON else ():
        assert word not in inside, f"{page.name} calls {inside[word]} by its name inside the code, {word}"
    known = {setting.name for setting in every} | {*EngineConfig.names()} | LIST_KEYS | NO_SETTINGS
    for key in re.findall(r"`([a-z0-9_]+): [^`]+`", text):
        assert key in known, f"{page.name}: there is no setting {key}"
    variables = {setting.env for setting in SETTINGS} | {*load._OTHER_VARIABLES}
    for variable in re.findall(r"TONLE_[A-Z0-9_]+", text):
        assert variable in variables, f"{page.name}: there is no variable {variable}"


def test_the_gateways_files_can_be_read(tmp_path: Path) -> None:
    blocks = re.findall(r"(?m)^    # tonle\.yaml.*\n(?:(?:    .*)?\n)+", (ROOT / "docs" / "gateway.md").read_text())
    assert len(blocks) == 2
    for block in blocks:
        file = tmp_path / "tonle.yaml"
        file.write_text(dedent(block))
        assert load.load_gateway({}, file=file, environ={}).backends


def test_the_table_of_the_audit_is_whole() -> None:
    table = re.search(r"\| `audit_…` .*?\n\n", (ROOT / "docs" / "audit.md").read_text(), re.DOTALL)
    assert table is not None
    rows = table.group().rstrip().splitlines()[2:]
    named = {f"audit_{name}" for row in rows for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    assert named == set(MIDDLEWARE_SETTINGS)


def test_the_table_of_the_engine_is_whole_and_has_its_defaults() -> None:
    page = (ROOT / "docs" / "library.md").read_text()
    table = re.search(r"\| `EngineConfig` \| default .*?\n\n", page, re.DOTALL)
    assert table is not None
    rows = [row.split("|") for row in table.group().rstrip().splitlines()[2:]]
    shown = {row[1].strip(" `"): eval(row[2].strip(" `"), {}) for row in rows}
    assert shown == {name: getattr(EngineConfig(), name) for name in EngineConfig.names()}
    assert all(row[3].strip() for row in rows)


def test_what_server_and_gateway_share_is_explained_alike() -> None:
    shared = set(GATEWAY_SETTINGS) & set(SERVE_SETTINGS)
    assert {"drain", "api_key", "cache_ttl", "log_level", "audit_dir", "ssl_certfile"} <= shared
    for name in shared:
        assert GATEWAY_SETTINGS[name].help == SERVE_SETTINGS[name].help, name
    assert "SIGTERM or Ctrl-C" in GATEWAY_SETTINGS["drain"].help


def test_the_page_for_users_of_vllm_has_every_flag_and_says_the_same_of_it() -> None:
    page = (ROOT / "docs" / "from-vllm.md").read_text()
    same, renamed, anyway, refused = (
        {word.split("`")[0].split()[0] for word in part.split("`--")[1:]}
        for part in re.split(r"\*\*(?:The same name|Another name|Accepted because|Refused)", page.split("## API")[0])[
            1:
        ]
    )
    ours = {setting.flag[2:] for setting in SERVE_SETTINGS.values()} | {"config"}
    assert same <= ours, "one of these is not a flag of ours"
    theirs = {flag.flag[2:]: flag for flag in VLLM_FLAGS.values()}
    for name, flag in theirs.items():
        if flag.setting is not None:
            assert name in renamed and SERVE_SETTINGS[flag.setting].flag[2:] in renamed | {"model"}, name
        elif flag.read_all is not None:
            assert name in renamed, name
        elif name in refused:
            assert set(flag.anyway) <= {"false", "none"}, f"{name} is accepted with {flag.anyway}"
        else:
            assert flag.anyway and {name, f"no-{name}"} & anyway, name
    known = ours | set(theirs) | {f"no-{name}" for name in (*ours, *theirs)}
    assert (same | renamed | anyway | refused) <= known, "the page names a flag that is not there"


def test_the_table_of_ray_is_whole() -> None:
    table = re.search(r"\| `ray:` .*?\n\n", (ROOT / "docs" / "scale.md").read_text(), re.DOTALL)
    assert table is not None
    rows = [row.split("|") for row in table.group().rstrip().splitlines()[2:]]
    shown = {row[1].strip(" `"): row[2].strip() for row in rows}
    assert shown == {name: setting.type.show(setting.default) for name, setting in RAY_SETTINGS.items()}
