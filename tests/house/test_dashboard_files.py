"""The dashboard's files: vendored ones as published, nothing inline or from elsewhere, readable sizes and colours."""

from __future__ import annotations

import hashlib
import re
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from tonle.gateway.api_keys.key import Scope

STATIC = Path(__file__).parents[2] / "src/tonle/gateway/dashboard/static"
VENDOR = STATIC / "vendor"
ALL = sorted(path for path in STATIC.rglob("*") if path.is_file())
OWN = [path for path in ALL if VENDOR not in path.parents]
SCRIPTS = [path for path in OWN if path.suffix == ".js"]
STYLES = [path for path in OWN if path.suffix == ".css"]
VENDORED = [path for path in ALL if VENDOR in path.parents and path.suffix in (".js", ".css")]

MAX_LINES = 350
NAMESPACE = re.compile(r"https?://www\.w3\.org/(2000/svg|1998/Math/MathML|1999/xhtml)")  # names, never asked for
THEMES = {"light": ":root", "dark": ':root[data-theme="dark"]'}


def name(path: Path) -> str:
    return str(path.relative_to(STATIC))


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("path", VENDORED, ids=name)
def test_a_vendored_file_is_the_one_that_the_readme_names(path: Path) -> None:
    row = re.search(rf"(?m)^\| {re.escape(path.name)} \| (\w+ [\d.]+) \| .*, (LICENSE-\w+\.txt) \| (\w{{64}}) \|$",
                    (VENDOR / "README.md").read_text())  # fmt: skip
    assert row is not None, "add a row with its version, licence and SHA-256"
    assert row[3] == hash_of(path.read_bytes())
    assert "ermission" in (VENDOR / row[2]).read_text()


def test_the_one_change_to_a_vendored_file_is_the_one_described() -> None:
    published = (VENDOR / "preact-hooks.js").read_bytes().replace(b'from"./preact.js"', b'from"preact"')
    assert hash_of(published) in (VENDOR / "README.md").read_text()


@pytest.mark.parametrize("path", OWN, ids=name)
def test_a_file_names_no_address_outside_this_server(path: Path) -> None:
    found = re.findall(r"[\w.+-]*://[^\s\"'`)]*|[\"'(]//[^\s\"'`)]+", NAMESPACE.sub("", path.read_text()))
    # An address with a variable in it, or of an example that is copied and not fetched, has no host of its own.
    assert [address for address in found if "${" not in address and "127.0.0.1" not in address] == []


@pytest.mark.parametrize("path", VENDORED, ids=name)
def test_a_vendored_file_loads_nothing(path: Path) -> None:
    assert not re.search(r"@import|url\(|fetch\(|importScripts|XMLHttpRequest|\beval\(|new Function", path.read_text())


@pytest.mark.parametrize("path", SCRIPTS, ids=name)
def test_words_in_a_template_keep_their_space(path: Path) -> None:
    """A line's end in a template is dropped with the spaces around it: beside an element, words run together."""
    inline = "(?:code|b|em|a|span)"
    found = re.findall(
        rf"</{inline}>\n\s+\w.*|.*[\w,;:.]\n\s+<{inline}\b(?![^>]*> ).*", re.sub(r"(?m)^\s*//.*", "", path.read_text())
    )
    assert found == [], 'put ${" "} between them, or both into one line'


@pytest.mark.parametrize("path", OWN, ids=name)
def test_a_file_obeys_the_content_security_policy(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"\beval\(|new Function|innerHTML|dangerouslySetInnerHTML|document\.write|javascript:", text)
    assert not re.search(r"""[\s"]style=["'][^"']""", text), "use a class, or Preact's style=${{…}}"
    assert not re.search(r"""\son[a-z]+=["']""", text), "no handlers as text"
    if path.suffix == ".html":
        assert not re.search(r"<style|<script(?![^>]*\ssrc=)", text)


@pytest.mark.parametrize("path", SCRIPTS + STYLES, ids=name)
def test_a_file_is_small_and_introduced(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= MAX_LINES
    assert lines[0].startswith("//" if path.suffix == ".js" else "/*"), "say what the file is for"


@pytest.mark.parametrize("path", SCRIPTS, ids=name)
def test_imports_lead_to_files_and_names_that_exist(path: Path) -> None:
    for names, target in re.findall(
        r"(?:import|export)\s*(\{[^}]*\}|\* as \w+|\w+)\s*from \"([^\"]+)\"", path.read_text()
    ):
        assert target.startswith("."), "browsers resolve only relative names"
        file = (path.parent / target).resolve()
        assert file.is_file(), target
        if VENDOR in file.parents or not names.startswith("{"):
            continue
        for wanted in re.findall(r"(\w+)(?: as \w+)?", names.replace(" as default", "")):
            text = file.read_text()
            assert re.search(
                rf"export (async )?(const|let|function|class) {wanted}\b|export \{{[^}}]*\b{wanted}\b", text
            ), f"{target} exports no {wanted}"


def test_the_page_names_files_that_exist() -> None:
    page = (STATIC / "index.html").read_text()
    targets = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(targets) >= 5
    for target in targets:
        assert (STATIC / target.removeprefix("/dashboard/static/")).is_file(), target
    styles = {path.name for path in STYLES}
    assert styles == {Path(target).name for target in targets if target.endswith(".css")} - {"uplot.css"}


def test_every_page_has_a_title_and_a_component() -> None:
    registry = re.search(r"const PAGES = \{([^}]+)\}", (STATIC / "app.js").read_text())
    assert registry is not None
    pages = re.findall(r"\w+", registry[1])
    assert len(pages) == 10
    for page in pages:
        text = (STATIC / "pages" / f"{page}.js").read_text()
        assert 'export const title = "' in text
        assert "export default function" in text


def test_a_key_can_be_created_with_every_scope() -> None:
    listed = re.search(r"(?s)const SCOPES = \{(.*?)\n\}", (STATIC / "pages/create_key.js").read_text())
    assert listed is not None
    assert tuple(re.findall(r"(?m)^  (\w+):", listed[1])) == get_args(Scope)


def test_custom_properties_that_are_used_exist() -> None:
    defined = set(re.findall(r"(--[\w-]+):", "".join(path.read_text() for path in STYLES)))
    for path in STYLES:
        used = set(re.findall(r"var\((--[\w-]+)", path.read_text()))
        assert used <= defined, name(path)


def colours(theme: str) -> dict[str, str]:
    text = (STATIC / "tokens.css").read_text()
    found: dict[str, str] = {}
    for selector in (THEMES["light"], THEMES[theme]):
        for block in re.findall(rf"(?ms)^{re.escape(selector)} \{{(.*?)^\}}", text):
            found |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
    return found


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES)
def test_colours_have_the_contrast_of_wcag_aa(theme: str) -> None:
    colour = colours(theme)
    texts = list(product(("text", "text-soft"), ("background", "surface", "surface-soft")))
    texts += [(kind, f"{kind}-soft") for kind in ("good", "warning", "bad", "accent")]
    texts += [("on-accent", "accent"), ("accent", "background"), ("accent", "surface"), ("bad", "surface")]
    texts += [("text", f"{kind}-soft") for kind in ("good", "warning", "bad", "accent")]
    lines = [(line, "surface") for line in ("control", *(f"line-{i}" for i in range(1, 7)))]
    weak = [(a, b, round(contrast(colour[a], colour[b]), 2)) for a, b in texts if contrast(colour[a], colour[b]) < 4.5]
    weak += [(a, b, round(contrast(colour[a], colour[b]), 2)) for a, b in lines if contrast(colour[a], colour[b]) < 3]
    assert weak == []
