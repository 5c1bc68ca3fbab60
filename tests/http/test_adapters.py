"""LoRA adapters over HTTP: loaded, listed, used, replaced and removed on one server."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.edge.running_server import until
from tests.fakes.adapter_folders import digest_of, folder_of
from tests.fakes.front import FakeFront
from tests.gateway.running_gateway import read_records
from tests.http.serving import events, serving
from tonle.audit.verify import verify
from tonle.replica.replica import ReplicaOptions

ADMIN, KEY = "admin-key", "caller-key"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
CHAT = "/v1/chat/completions"


class Reply:
    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status = answer.status
        self.headers = {name.lower(): value for name, value in answer.getheaders()}
        self.text = answer.read().decode()

    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> str:
        return str(self.json()["error"]["message"])


def call(url: str, path: str, body: Any = None, *, key: str | None = ADMIN, **headers: str) -> Reply:
    line = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    headers |= {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    line.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
    try:
        return Reply(line.getresponse())
    finally:
        line.close()


def ask(url: str, model: str | None = "khmer-qa", *, key: str | None = KEY, **fields: Any) -> Reply:
    body = {"messages": [{"role": "user", "content": "hi"}], "model": model, "temperature": 0, **fields}
    return call(url, CHAT, {name: value for name, value in body.items() if value is not None}, key=key)


def load(url: str, path: str, name: str = "khmer-qa", *, key: str | None = ADMIN, **fields: Any) -> Reply:
    return call(url, LOAD, {"lora_name": name, "lora_path": path, **fields}, key=key)


def said(reply: Reply) -> str:
    assert reply.status == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeFront, str]]:
    front = FakeFront()
    state = tmp_path_factory.mktemp("state") / "keys.db"
    settings = {"api_key": (KEY,), "admin_key": (ADMIN,), "state_db": str(state)}
    with serving(front, ReplicaOptions(aliases=("nickname",)), **settings) as url:
        yield front, url


@pytest.fixture
def front(_shared: tuple[FakeFront, str]) -> FakeFront:
    _shared[0].__init__(lambda prompt, index: "hello")  # type: ignore[misc]
    return _shared[0]


@pytest.fixture
def url(front: FakeFront, _shared: tuple[FakeFront, str]) -> str:
    return _shared[1]


@pytest.fixture
def khmer(tmp_path: Path) -> str:
    return folder_of(tmp_path / "khmer", "K:")


def test_loaded_listed_used_and_removed(url: str, khmer: str) -> None:
    assert ask(url).status == 404
    reply = load(url, khmer)
    assert (reply.status, reply.text) == (200, "Success: LoRA adapter 'khmer-qa' added successfully.")
    assert reply.headers["content-type"].startswith("text/plain")
    named = f"khmer-qa@sha256:{digest_of('K:')}"
    assert reply.headers["x-tonle-adapter"] == named
    listed = {entry["id"]: entry for entry in call(url, "/v1/models").json()["data"]}
    assert list(listed) == ["scripted", "nickname", "khmer-qa"]
    adapter = listed["khmer-qa"]
    assert (adapter["parent"], adapter["digest"], adapter["root"]) == ("scripted", digest_of("K:"), khmer)
    assert "digest" not in listed["scripted"] and listed["scripted"]["parent"] is None
    assert call(url, "/v1/models/khmer-qa").json() == adapter

    whole = ask(url)
    assert said(whole) == "K:hello" and whole.json()["model"] == "khmer-qa"
    stream = ask(url, stream=True)
    *chunks, done = events(stream.text)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"]) == "K:hello"
    assert done == "[DONE]" and {chunk["model"] for chunk in chunks} == {"khmer-qa"}
    assert whole.headers["x-tonle-adapter"] == stream.headers["x-tonle-adapter"] == named
    for base in ("scripted", "nickname", None):
        plain = ask(url, base)
        assert said(plain) == "hello" and "x-tonle-adapter" not in plain.headers
    assert call(url, "/tokenize", {"model": "khmer-qa", "prompt": "hi"}).json()["count"] == 3

    removed = call(url, UNLOAD, {"lora_name": "khmer-qa", "lora_int_id": 7})
    assert (removed.status, removed.text) == (200, "Success: LoRA adapter 'khmer-qa' removed successfully.")
    gone = ask(url)
    assert (gone.status, gone.json()["error"]["code"]) == (404, "model_not_found")
    assert [entry["id"] for entry in call(url, "/v1/models").json()["data"]] == ["scripted", "nickname"]
    assert call(url, UNLOAD, {"lora_name": "khmer-qa"}).status == 404


def test_only_admins_load_and_see_where_it_came_from(url: str, khmer: str) -> None:
    assert load(url, khmer, key=KEY).status == 403 and load(url, khmer, key=None).status == 401
    assert call(url, UNLOAD, {"lora_name": "khmer-qa"}, key=KEY).status == 403
    assert load(url, khmer).status == 200
    for path in ("/v1/models", "/v1/models/khmer-qa"):
        assert khmer in call(url, path).text
        shown = call(url, path, key=KEY)
        assert khmer not in shown.text and digest_of("K:") in shown.text


def test_without_keys_only_enable_lora_opens_loading(khmer: str) -> None:
    front = FakeFront()
    with serving(front, lora=(("khmer-qa", khmer),)) as url:  # `--lora` alone: served, no more
        asyncio.run(front.load_adapter("khmer-qa", khmer))
        assert ask(url, key=None).status == 200
        assert khmer not in call(url, "/v1/models", key=None).text
        for refused in (load(url, khmer, "x", key=None), call(url, UNLOAD, {"lora_name": "khmer-qa"}, key=None)):
            assert refused.status == 403 and "--enable-lora" in refused.error and "--admin-key" in refused.error
        assert ask(url, key=None).status == 200
    with serving(FakeFront(), enable_lora=True) as url:
        assert load(url, khmer, key=None).status == 200
        assert khmer in call(url, "/v1/models", key=None).text, "who may load may see the folder"
        page = load(url, khmer, "other", key=None)
        assert page.status == 200
        foreign = call(url, LOAD, {"lora_name": "x", "lora_path": khmer}, key=None, Origin="https://evil.example")
        assert foreign.status == 403, "a web page of another site"


def test_what_is_refused_and_why(url: str, front: FakeFront, khmer: str, tmp_path: Path) -> None:
    broken = load(url, folder_of(tmp_path / "broken", "broken"))
    assert broken.status == 400 and "layers.0.self_attn.q_proj.lora_A.weight" in broken.error
    assert "No such file" in load(url, str(tmp_path / "nowhere")).error
    for name in ("/etc/x", "s3://b/x", "../x", "a b", "", "~x"):
        refused = load(url, khmer, name)
        assert refused.status == 400 and "neither a path nor a URL" in refused.error, name
    for name in ("scripted", "nickname"):
        assert "the name of the model itself" in load(url, khmer, name).error
    elsewhere = load(url, "https://host/adapter").error
    assert "PEFT folder" in elsewhere and "hf download ORG/NAME --local-dir FOLDER" in elsewhere
    assert "lora_path" in call(url, LOAD, {"lora_name": "x"}).error
    assert load(url, khmer, base_model="other").status == 400
    assert load(url, khmer, base_model="nickname").status == 200
    twice = load(url, khmer)
    assert twice.status == 400 and "load_inplace" in twice.error
    assert front.card is not None
    front.card.max_loras = 0
    refused = load(url, khmer, "other")
    assert refused.status == 400 and "--enable-lora" in refused.error
    front.card = None
    assert load(url, khmer, "other").status == 503


@pytest.mark.parametrize(
    "model",
    ["/adapters/khmer", "./khmer", "../khmer", "~/khmer", "https://host/khmer", "s3://b/k", "C:\\khmer", "a/../b"],
)
def test_a_model_that_is_a_path_or_a_url_is_refused(url: str, model: str) -> None:
    refused = ask(url, model)
    assert (refused.status, refused.json()["error"]["param"]) == (400, "model")
    assert "path or URL" in refused.error and "scripted" in refused.error


def test_other_names_are_not_found_and_other_fields_have_a_hint(url: str) -> None:
    assert (ask(url, "org/name").status, ask(url, "khmer").status) == (404, 404)
    for field in ("lora_path", "adapter"):
        refused = ask(url, "scripted", **{field: "/x"})
        assert refused.status == 400 and "as model" in refused.error


def test_the_answer_is_never_that_of_content_it_does_not_name(url: str, khmer: str, tmp_path: Path) -> None:
    """Replaced in place, also to what it was before: the response cache goes by content."""
    load(url, khmer)
    first, again = (ask(url, use_cache=True) for _ in range(2))
    assert (said(first), said(again), again.headers["x-cache"]) == ("K:hello", "K:hello", "hit")
    assert again.headers["x-tonle-adapter"] == first.headers["x-tonle-adapter"]
    other = folder_of(tmp_path / "other", "L:")
    assert load(url, other, load_inplace=True).status == 200
    replaced = ask(url, use_cache=True)
    assert (said(replaced), replaced.headers["x-cache"]) == ("L:hello", "miss")
    assert replaced.headers["x-tonle-adapter"].endswith(digest_of("L:"))
    load(url, khmer, load_inplace=True)
    back = ask(url, use_cache=True)
    assert (said(back), back.headers["x-cache"]) == ("K:hello", "hit")
    assert ask(url, use_cache=True, stream=True).headers["x-cache"] == "miss"
    stream = ask(url, use_cache=True, stream=True)
    assert stream.headers["x-cache"] == "hit" and stream.headers["x-tonle-adapter"].endswith(digest_of("K:"))


def test_requests_under_way_when_it_is_removed_are_answered(url: str, front: FakeFront, khmer: str) -> None:
    load(url, khmer)
    front.delay_s = 0.05
    replies: list[Reply] = []
    threads = [threading.Thread(target=lambda s=s: replies.append(ask(url, stream=s))) for s in (True, False)]
    for thread in threads:
        thread.start()
    for _ in range(12_000):
        if len(front.submitted) == 2:
            break
        threads[0].join(0.01)
    assert call(url, UNLOAD, {"lora_name": "khmer-qa"}).status == 200
    assert ask(url).status == 404
    for thread in threads:
        thread.join(60)
    assert [reply.status for reply in replies] == [200, 200] and all("h" in reply.text for reply in replies)


def test_a_load_goes_on_when_its_caller_hangs_up(url: str, front: FakeFront, khmer: str) -> None:
    front.loading.clear()
    line = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN}"}
    line.request("POST", LOAD, json.dumps({"lora_name": "khmer-qa", "lora_path": khmer}), headers)
    until(lambda: front.loading._waiters, "the load was not begun")
    assert ask(url).status == 404
    line.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing sends a reset
    line.close()
    assert {ask(url).status for _ in range(10)} == {404}  # and the server time to see that its caller is gone
    front.loading._loop.call_soon_threadsafe(front.loading.set)  # type: ignore[attr-defined]
    for _ in range(600):
        if ask(url).status == 200:
            return
    raise AssertionError("it was given up")


def test_what_the_engine_will_have_again_is_not_unknown_but_comes_too_early(
    front: FakeFront, url: str, khmer: str
) -> None:
    load(url, khmer)
    front.adapters, front.awaited_adapters = {}, front.adapters  # of an engine that came back and reads it again
    for early in (ask(url), ask(url, stream=True), call(url, UNLOAD, {"lora_name": "khmer-qa"})):
        assert (early.status, early.headers["retry-after"]) == (503, "2") and "loaded again" in early.error
    listed = call(url, "/v1/models/khmer-qa")
    assert (listed.status, listed.json()["digest"]) == (200, digest_of("K:")), "gateways go on knowing it"
    assert ask(url, "other").status == 404 and said(ask(url, "scripted")) == "hello"
    card, front.card = front.card, None  # the engine is gone
    assert ask(url).status == 503 and "retry-after" in ask(url).headers
    front.card, front.adapters, front.awaited_adapters = card, front.awaited_adapters, {}
    assert said(ask(url)) == "K:hello"


def test_adapters_of_the_start_are_known_before_the_engine_is_ready(khmer: str) -> None:
    front = FakeFront()
    card, front.card = front.card, None
    with serving(front, lora=(("khmer-qa", khmer),)) as url:
        assert (ask(url, key=None).status, ask(url, "other", key=None).status) == (503, 404)
        front.card = card
        assert ask(url, key=None).status == 404, "the engine says which ones it has"


def test_name_and_digest_are_on_record(khmer: str, tmp_path: Path) -> None:
    trail = tmp_path / "audit"
    with serving(FakeFront(lambda prompt, index: "hello"), audit_dir=str(trail), enable_lora=True) as url:
        load(url, khmer, key=None)
        for fields in ({}, {"stream": True}, {"use_cache": True}, {"use_cache": True}):
            assert ask(url, key=None, **fields).status == 200
        ask(url, "scripted", key=None)
        ask(url, max_tokens=-1, key=None)
        ask(url, "/etc/passwd", key=None)
        assert call(url, UNLOAD, {"lora_name": "khmer-qa"}, key=None).status == 200
    *used, cached, base, refused, path = read_records(trail)
    assert len(used) == 3, "loads and removals are not on the trail"
    for record in (*used, cached):
        assert (record["model"], record["adapter"], record["adapter_digest"]) == (
            "khmer-qa",
            "khmer-qa",
            digest_of("K:"),
        )
        assert record["model_config"]["parent"] == "scripted"
    assert cached["status"] == "cached"
    assert (base["adapter"], base["adapter_digest"]) == (None, None)
    assert (refused["adapter"], refused["adapter_digest"]) == ("khmer-qa", None), "nothing was computed"
    assert (path["status"], path["model"], path["adapter"]) == ("refused", "/etc/passwd", None)
    assert verify(trail).ok


def test_the_metric_of_vllm(url: str, front: FakeFront) -> None:
    front.stats.running_adapters, front.stats.waiting_adapters = ["b", "a"], ["c"]
    text = call(url, "/metrics").text
    assert 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters="c"} 1' in text
    assert front.card is not None
    front.card.max_loras = 0
    assert "lora_requests_info" not in call(url, "/metrics").text


def test_the_api_describes_them(url: str) -> None:
    api = call(url, "/openapi.json").json()
    body = api["components"]["schemas"]["LoadAdapterRequest"]
    assert body["required"] == ["lora_name", "lora_path"] and LOAD in api["paths"] and UNLOAD in api["paths"]
    assert "digest" in api["components"]["schemas"]["ModelInfo"]["properties"]


def test_the_log_says_why_a_change_was_refused(
    url: str, khmer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="tonle.http"):
        nowhere = str(tmp_path / "no\nwhere")
        assert load(url, nowhere).status == 400
        assert call(url, UNLOAD, {"lora_name": "absent"}).status == 404
        assert load(url, khmer).status == 200
    refused, unknown, fine = _lines(caplog, 3)
    assert f"{LOAD} 400" in refused and "LoRA adapter khmer-qa from " in refused and "No such file" in refused
    assert "no\\nwhere" in refused and "\n" not in refused, "one line, whatever the path"
    assert f"{UNLOAD} 404" in unknown and "LoRA adapter absent: " in unknown and "cannot be found" in unknown
    assert f"{LOAD} 200" in fine and "LoRA adapter" not in fine


def _lines(caplog: pytest.LogCaptureFixture, number: int) -> list[str]:
    """Of `tonle.http`: each is written just after its reply."""
    for _ in range(12_000):
        lines = [record.getMessage() for record in caplog.records if record.name == "tonle.http"]
        if len(lines) >= number:
            return lines
        threading.Event().wait(0.01)
    raise AssertionError(lines)


def test_fields_without_effect_are_warned_about_or_refused(url: str, front: FakeFront, khmer: str) -> None:
    body = {"lora_name": "khmer-qa", "lora_path": khmer, "load_in_place": True}
    strict = {"X-Tonle-Strict": "1"}
    refused = call(url, LOAD, body, **strict)
    assert (refused.status, refused.json()["error"]["param"]) == (400, "load_in_place")
    assert "unknown field" in refused.error and not front.adapters
    served = call(url, LOAD, body)
    assert (served.status, served.headers["x-tonle-warnings"]) == (200, "1; load_in_place")
    refused = call(url, UNLOAD, {"lora_name": "khmer-qa", "force": True}, **strict)
    assert (refused.status, refused.json()["error"]["param"]) == (400, "force") and front.adapters
    removed = call(url, UNLOAD, {"lora_name": "khmer-qa", "lora_int_id": 7}, **strict)
    assert removed.status == 200 and "x-tonle-warnings" not in removed.headers
    with serving(FakeFront(), enable_lora=True, strict=True) as other:
        assert call(other, LOAD, body, key=None).status == 400


def test_replacing_says_so(url: str, khmer: str, tmp_path: Path) -> None:
    other = folder_of(tmp_path / "other", "L:")
    assert load(url, khmer, load_inplace=True).text == "Success: LoRA adapter 'khmer-qa' added successfully."
    assert load(url, other, load_inplace=True).text == "Success: LoRA adapter 'khmer-qa' replaced successfully."
