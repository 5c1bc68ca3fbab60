"""The page and its files: what is there, with which headers, and that nothing else can be reached."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.fakes.front import FakeFront
from tests.http.serving import serving
from tonle.gateway.dashboard.files import TYPES, StaticFiles
from tonle.gateway.dashboard.pages import POLICY

ROOT = Path(__file__).parents[3]
STATIC = ROOT / "src" / "tonle" / "gateway" / "dashboard" / "static"
WANTED = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@pytest.fixture(scope="module")
def url() -> object:
    with serving(FakeFront()) as found:
        yield found


@pytest.mark.parametrize(
    ("path", "status", "caching"),
    [
        ("/dashboard", 200, "no-cache"),
        ("/dashboard/", 200, "no-cache"),
        ("/dashboard/static/app.js", 200, "no-cache"),
        ("/dashboard/static/nothing.js", 404, None),
        ("/dashboard/api/session", 200, "no-store"),
        ("/dashboard/api/requests", 200, "no-store"),
        ("/dashboard/api/requests/req-1", 404, "no-store"),
        ("/dashboard/api/history?range=7", 400, "no-store"),
        ("/dashboard/api/login", 405, "no-store"),
    ],
)
def test_every_reply_has_the_security_headers(url: str, path: str, status: int, caching: str | None) -> None:
    for method in ("GET", "HEAD"):
        reply = httpx.request(method, f"{url}{path}")
        assert reply.status_code == status
        assert {name: reply.headers.get(name) for name in WANTED} == WANTED
        assert reply.headers.get("cache-control") == caching


def test_the_policy_allows_no_script_that_is_not_a_file_of_ours(url: str) -> None:
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules["default-src"] == "'none'" and rules["script-src"] == "'self'" and rules["style-src"] == "'self'"
    assert rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert "unsafe" not in POLICY and "http" not in POLICY
    page = httpx.get(f"{url}/dashboard").text
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=|javascript:|https?://", page)
    for name in re.findall(r'(?:src|href)="([^"#]+)"', page):
        if not name.startswith("data:"):
            assert httpx.get(f"{url}{name}").status_code == 200, name


def test_a_file_that_the_browser_has_is_not_sent_again(url: str) -> None:
    first = httpx.get(f"{url}/dashboard/static/app.js")
    assert first.headers["content-type"] == "text/javascript; charset=utf-8"
    for known in (first.headers["etag"], f'"other", W/{first.headers["etag"]}'):
        again = httpx.get(f"{url}/dashboard/static/app.js", headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
        assert again.headers["content-security-policy"] == POLICY
    assert httpx.get(f"{url}/dashboard/static/app.js", headers={"if-none-match": '"other"'}).content == first.content


def test_all_files_of_the_page_are_served_with_their_types(url: str) -> None:
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        reply = httpx.get(f"{url}/dashboard/static/{path.relative_to(STATIC)}")
        assert (reply.status_code, reply.content) == (200, path.read_bytes()), path
        assert reply.headers["content-type"] == TYPES[path.suffix]


@pytest.mark.parametrize(
    "target",
    [
        "../pages.py", "..%2fpages.py", "%2e%2e/pages.py", "%2e%2e%2fpages.py", "vendor/../../pages.py", "..\\pages.py",
        "/etc/passwd", "%2fetc%2fpasswd", "app.js%00", "app.js/", "./app.js", "vendor", "", "APP.JS", "app.js%20",
        "vendor//preact.js", "....//pages.py", "%252e%252e/pages.py", "file:///etc/passwd",
    ],
)  # fmt: skip
def test_no_name_leads_out_of_the_table(url: str, target: str) -> None:
    """By a raw socket: clients would tidy the path."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120) as line:
        line.sendall(f"GET /dashboard/static/{target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: line.recv(65536), b""))
    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")), answer[:200]


def test_only_known_types_are_read(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a.js", "sub/b.css", "secret.py", "noextension", ".env", "key.pem"):
        (tmp_path / name).write_text(name)
    files = StaticFiles(tmp_path)
    assert [files.get(name) is not None for name in ("a.js", "sub/b.css")] == [True, True]
    assert [files.get(name) for name in ("secret.py", "noextension", ".env", "key.pem", "sub")] == [None] * 5
    assert StaticFiles(tmp_path / "missing").get("index.html") is None


def test_the_files_are_part_of_the_package() -> None:
    """The wheel has what is below src/tonle, but for what git ignores."""
    assert 'packages = ["src/tonle"]' in (ROOT / "pyproject.toml").read_text()
    files = [str(path) for path in STATIC.rglob("*") if path.is_file()]
    ignored = subprocess.run(["git", "check-ignore", *files], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ignored.stdout == ""
