"""Grammars made to harm, sent to the real server with the default model, while another caller is served."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.server import Server, tonle_serve

pytestmark = pytest.mark.model

MEMORY_KB = 400 * 1024  # more than all of these may take, and less than one of them would without limits
NESTED = '{"type":"array","items":' * 10_000 + "{}" + "}" * 10_000
AMBIGUOUS = 'start: s\ns: s s | s s s | "a" | "b"\n'
PATTERNS = [{"pattern": f".*{chr(97 + i)}.*"} for i in range(26)]
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 500}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "10,000 levels": ({"guided_json": NESTED}, "more than 100 levels"),
    "1 MB": ({"guided_json": {"description": "x" * 1_000_000}}, "at most 262144 are taken"),
    "a remote $ref": ({"guided_json": {"$ref": "http://127.0.0.1:9/schema"}}, "nothing is fetched"),
    "a file": ({"guided_json": {"$ref": "file:///etc/passwd"}}, "nothing is fetched"),
    "a $ref to itself": ({"guided_json": {"$ref": "#"}}, "no text at all fits it"),
    "a property that requires itself": (
        {"guided_json": {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}}, "would not end",
    ),
    "patterns together": ({"guided_json": {"type": "string", "allOf": PATTERNS}}, "more than 8 patterns"),
    "remainders": ({"guided_json": {"type": "integer", "multipleOf": 99_999_989}}, "at most 100000 is taken"),
    "names by patterns": (
        {"guided_json": {"patternProperties": {f"^p{i}$": {} for i in range(5_000)}}}, "5000 patternProperties",
    ),
    "alternatives of all": (
        {"guided_json": {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(4)]} for i in range(9)]}},
        "too large",
    ),
    "repetitions": ({"guided_regex": "((a{1,1000}){1,1000}){1,1000}"}, "patterns are too complex"),
    "letters": ({"guided_grammar": "a" * 250_000}, "the grammar cannot be used"),
    "blanks": ({"guided_grammar": 'root ::= "a"{1,' + " " * 60_000}, "cannot be read"),
    "rules twice each": (
        {"guided_grammar": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40 ::= "a"'},
        "too complex",
    ),
    "a tool": (
        {"tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"allOf": PATTERNS}}}}},
        ]},
        "tools[0].function.parameters",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(default_model: object) -> Iterator[Server]:
    with tonle_serve() as server:
        yield server


def post(server: Server, **fields: Any) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "temperature": 1, "seed": 1, **fields}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def resident_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


class Stream(threading.Thread):
    """An answer of another caller, to its end."""

    def __init__(self, server: Server, **fields: Any) -> None:
        super().__init__(daemon=True)
        self.began = threading.Event()
        self.lines: list[str] = []
        self._server, self._fields = server, fields
        self.start()

    def run(self) -> None:
        for line in post(self._server, stream=True, ignore_eos=True, **self._fields):
            if line.strip():
                self.lines.append(line.decode().strip())
                self.began.set()
            if self.lines and (self.lines[-1] == "data: [DONE]" or '"error"' in self.lines[-1]):
                return

    def finish(self) -> list[str]:
        self.join(120)
        assert not self.is_alive()
        return self.lines


def test_bombs_are_refused_with_a_reason_and_others_are_served(server: Server) -> None:
    pids = (server.process.pid, server.engine_pid())
    before = [resident_kb(pid) for pid in pids]
    other = Stream(server, max_tokens=150)
    assert other.began.wait(60)
    for name, (fields, words) in REFUSED.items():
        reply = post(server, **fields)
        error = json.loads(reply.read()).get("error", {})
        assert (name, reply.status) == (name, 400) and words in error["message"], (name, error)
    assert all(resident_kb(pid) - was < MEMORY_KB for pid, was in zip(pids, before, strict=True))
    assert other.finish()[-1] == "data: [DONE]"
    assert server.engine_pid() == pids[1]


def test_a_grammar_that_becomes_too_much_ends_alone(server: Server) -> None:
    """It was compiled; what is in the way shows in the middle of the answer."""
    other = Stream(server, max_tokens=60, guided_json=NUMBERS)
    assert other.began.wait(60)
    schema = {"$defs": {"r": {"type": "object", "properties": {"a": {"$ref": "#/$defs/r"}}, "required": ["a"]}},
              "type": "object", "properties": {"c": {"enum": ["x", "y"]}, "r": {"$ref": "#/$defs/r"}},
              "required": ["c", "r"]}  # fmt: skip
    reply = post(server, guided_json=schema)
    assert reply.status == 400 and b"leaves no choice without an end" in reply.read()
    lines = other.finish()
    assert lines[-1] == "data: [DONE]" and not any('"error"' in line for line in lines)


def test_bound_streams_of_an_engine_that_is_killed_end_with_an_error(server: Server) -> None:
    streams = [Stream(server, max_tokens=400, guided_json=NUMBERS) for _ in range(3)]
    assert all(stream.began.wait(60) for stream in streams)
    os.kill(server.engine_pid(), signal.SIGKILL)
    for stream in streams:
        assert "the engine stopped while it worked on this request" in stream.finish()[-1]
    server.wait_ready()
    reply = post(server, guided_choice=["yes"])
    assert json.loads(reply.read())["choices"][0]["message"]["content"] == "yes"
