"""Real pools behind real servers: alone, beside a language model, behind a gateway; asked by the `openai` client as it is."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fakes.front import FakeFront
from tests.gateway.running_gateway import KEY, read_records, run, running_gateway
from tests.workers import media_kinds
from tonle.config.load_settings import load_worker
from tonle.config.routing import BackendConfig
from tonle.config.serve import ServeConfig
from tonle.config.workers import WorkerConfig
from tonle.edge.listening import bind, local_url
from tonle.errors import ConfigError
from tonle.gateway.gateway import Gateway
from tonle.protocol.media_paths import SPEECH, TRANSCRIPTIONS
from tonle.replica.serve import build_server as build_engine_server
from tonle.workers.builtin import BUILTIN, BuiltinKind
from tonle.workers.serve import ServedPools, build_server, pool_config

SOUND = bytes(range(256)) * 40
HERE = media_kinds.__name__


@pytest.fixture(autouse=True)
def small_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of models."""
    monkeypatch.setitem(BUILTIN, "asr", BuiltinKind(f"{HERE}:Recite", {TRANSCRIPTIONS: f"{HERE}:transcriptions"}))
    monkeypatch.setitem(BUILTIN, "tts", BuiltinKind(f"{HERE}:Speak", {SPEECH: f"{HERE}:speech"}))


def rows(*given: dict[str, Any]) -> list[WorkerConfig]:
    return [WorkerConfig(**row) for row in given]


@contextlib.asynccontextmanager
async def listening(server: Gateway, served: ServedPools) -> AsyncIterator[str]:
    listener = bind("127.0.0.1", 0)
    async with served.running():
        await server.start(listener)
        try:
            await served.wait_ready()
            yield local_url(*listener.getsockname()[:2])
        finally:
            await server.stop(drain_s=5)


@contextlib.asynccontextmanager
async def beside_an_engine(*given: dict[str, Any], **settings: Any) -> AsyncIterator[str]:
    served = ServedPools(rows(*given))
    config = ServeConfig(port=0, drain_s=5.0, dashboard=False, **settings)
    front: Any = FakeFront()
    async with listening(build_engine_server(front, config, workers=served.local), served) as url:
        yield url


@contextlib.asynccontextmanager
async def alone(row: dict[str, Any], **settings: Any) -> AsyncIterator[str]:
    """As `tonle worker` does."""
    config = load_worker({"port": "0", "dashboard": "off", **row, **settings}, environ={})
    served = ServedPools([config.pool()])
    async with listening(build_server(served, config), served) as url:
        yield url


def client_of(url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def test_an_engine_and_pools_are_one_server(tmp_path: Path) -> None:
    async def main() -> None:
        shout = {"kind": "tests.workers.kinds:Scripted", "name": "echo"}
        pools = ({"kind": "asr", "model": "whisper"}, {"kind": "tts"}, shout)
        async with (
            beside_an_engine(*pools, audit_dir=str(tmp_path / "audit")) as url,
            httpx.AsyncClient(base_url=url) as http,
        ):
            client = client_of(url)
            names = [each.id async for each in client.models.list()]
            assert names[0] != "whisper" and {"whisper", "tts", "echo"} < set(names)
            said = await client.chat.completions.create(model=names[0], messages=[{"role": "user", "content": "hi"}])
            assert said.choices[0].message.content
            unnamed = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
            assert unnamed.status_code == 200 and unnamed.json()["model"] == names[0]  # the path decides
            wrong = await http.post("/v1/chat/completions", json={"model": "whisper", "messages": []})
            assert wrong.status_code == 404
            told = await client.audio.transcriptions.create(model="whisper", file=("a.wav", SOUND), language="km")
            assert told.text == f"{len(SOUND)} bytes in km"
            form: dict[str, Any] = {"data": {"language": "km"}, "files": {"file": ("a.wav", SOUND)}}
            assert (await http.post(TRANSCRIPTIONS, **form)).json() == {"text": f"{len(SOUND)} bytes in km"}
            form["data"]["model"] = names[0]
            assert (await http.post(TRANSCRIPTIONS, **form)).status_code == 404  # the language model hears nothing
            async with client.audio.speech.with_streaming_response.create(
                model="tts", input="ab cd", voice="x"
            ) as sound:
                assert await sound.read() == b"abcd"
            spoken = await http.post("/v1/audio/speech", json={"input": "ab", "voice": "x"})
            assert spoken.headers["x-tonle-pool"] == "tts"
            told_of = await http.get(f"/v1/requests/{spoken.headers['x-request-id']}/explain")
            assert [span["detail"] for span in told_of.json()["spans"] if span["name"] == "worker"] == [
                "pool tts, 133 ms of sound"
            ]
            own = await http.post("/v1/workers/echo", json={"name": "n", "media": [base64.b64encode(b"abc").decode()]})
            assert own.json()["name"] == "n" and own.json()["media"] == [base64.b64encode(b"abc").decode()]
            missing = await http.post("/v1/images/generations", json={"prompt": "x"})
            assert missing.status_code == 501 and "--worker images" in missing.json()["error"]["message"]
            metrics = (await http.get("/metrics")).text
            assert 'tonle_worker_jobs_total{model_name="whisper",outcome="success",pool="asr"} 2.0' in metrics
            assert "vllm:num_requests_running" in metrics
            health = (await http.get("/health")).json()
            assert health["status"] == "healthy" and [pool["name"] for pool in health["pools"]] == [
                "asr",
                "tts",
                "echo",
            ]

    run(main())
    records = read_records(tmp_path / "audit")
    spoken = next(record for record in records if record["endpoint"] == SPEECH)
    assert spoken["output"] == {"content_type": "audio/pcm", "size": 4, "sha256": hashlib.sha256(b"abcd").hexdigest()}
    heard = [record for record in records if record["endpoint"] == TRANSCRIPTIONS]
    assert [record["status"] for record in heard] == ["ok", "ok", "refused"]
    assert heard[0]["usage"]["audio_seconds"] == 3.0


def test_a_pool_alone_is_a_backend_like_any_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with alone({"kind": "asr", "model": "whisper"}, api_key="worker-key") as worker:
            assert (await httpx.AsyncClient().get(f"{worker}/v1/models")).status_code == 401
            backend = BackendConfig(url=worker, name="ears", api_key="worker-key")
            async with running_gateway(tmp_path, backends=lambda: (backend,)) as gateway:
                assert not gateway.gateway.pool.backends[0].warning  # there are no prefixes to keep apart
                client = client_of(gateway.url, KEY)
                assert [each.id async for each in client.models.list()] == ["whisper"]
                told = await client.audio.transcriptions.create(model="whisper", file=("a.wav", SOUND), language="km")
                assert told.text == f"{len(SOUND)} bytes in km"

    run(main())
    (record,) = read_records(tmp_path / "audit")
    assert record["route"]["backend"] == "ears" and record["usage"]["audio_seconds"] == 3.0


def test_a_worker_that_is_killed_at_work_is_replaced_and_the_request_answered_once(tmp_path: Path) -> None:
    async def main() -> None:
        options = {"die_unless": str(tmp_path / "died")}
        async with beside_an_engine({"kind": "asr", "options": options}, audit_dir=str(tmp_path / "audit")) as url:
            told = await client_of(url).audio.transcriptions.create(model="asr", file=("a.wav", SOUND), language="km")
            assert told.text == f"{len(SOUND)} bytes in km"
            assert (tmp_path / "died").exists()

    run(main())
    (record,) = read_records(tmp_path / "audit")
    assert (record["status"], record["http_status"]) == ("ok", 200)


def test_a_worker_that_dies_again_is_a_failure_on_record(tmp_path: Path) -> None:
    async def main() -> None:
        echo = {"kind": "tests.workers.kinds:Scripted", "name": "echo"}
        async with (
            beside_an_engine(echo, audit_dir=str(tmp_path / "audit")) as url,
            httpx.AsyncClient(base_url=url) as http,
        ):
            died = await http.post("/v1/workers/echo", json={"do": "die"}, timeout=60)
            assert died.status_code >= 500 and died.json()["error"]["message"]
            assert (await http.post("/v1/workers/echo", json={"do": "echo"}, timeout=60)).status_code == 200
            refused = await http.post("/v1/workers/echo", json={"do": "refuse"}, timeout=60)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "name"

    run(main())
    statuses = [record["status"] for record in read_records(tmp_path / "audit")]
    assert statuses[0] in ("failed", "refused") and statuses[1:] == ["ok", "refused"]


def test_pools_from_settings(tmp_path: Path) -> None:
    (tmp_path / "bge").mkdir()
    config = pool_config(WorkerConfig(kind="embeddings", model=str(tmp_path / "bge"), timeout="2m", max_memory="1GiB"))
    assert (config.model_name, config.timeout_s, config.max_memory_mb) == ("bge", 120.0, 1024)
    assert pool_config(WorkerConfig(kind="asr", model="org/name")).model_name == "org/name"
    with pytest.raises(ConfigError, match="two worker pools have the name asr"):
        ServedPools(rows({"kind": "asr"}, {"kind": "asr", "model": "b"}))
    with pytest.raises(ConfigError, match="kind of worker 'nothing'"):
        ServedPools(rows({"kind": "nothing"}))
    front: Any = FakeFront()
    served = ServedPools(rows({"kind": "tests.workers.kinds:Scripted", "served_name": front.name}))
    with pytest.raises(ConfigError, match="both called"):

        async def build() -> None:
            build_engine_server(front, ServeConfig(port=0), workers=served.local)

        asyncio.run(build())
