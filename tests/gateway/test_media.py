"""Sound and pictures through a gateway: forms as they came, answers as they come, keys, limits and records as for any request."""

from __future__ import annotations

import asyncio
import base64
import csv
import hashlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from tests.gateway.running_gateway import KEY, RunningGateway, read_records, run, running_gateway, until
from tonle.audit.chain import Chain
from tonle.audit.media_store import media_name
from tonle.audit.retention import redact_records, removing
from tonle.audit.signing_keys import load_key
from tonle.audit.verify import verify
from tonle.config.routing import BackendConfig
from tonle.edge.exchange import Exchange
from tonle.edge.listening import bind, local_url
from tonle.edge.server import HttpServer, ServerLimits
from tonle.errors import ConfigError
from tonle.protocol.multipart import parse_form

SOUND = bytes(range(256)) * 400  # 102,400 bytes
SPOKEN = b"RIFF" + bytes(range(256)) * 100
PICTURE = b"\x89PNG" + bytes(100)
AUTH = {"authorization": f"Bearer {KEY}"}


class MediaUpstream:
    """Answers like OpenAI. `pause`: speech stops after its first piece until it is set."""

    def __init__(self, *models: str) -> None:
        self.models = models
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.pause: asyncio.Event | None = None
        self.breaks = False  # after the first piece of speech
        self.rambles = False  # speech goes on for long
        self.status = 200
        self.url = ""
        self.server = HttpServer(self._handle, ServerLimits(max_body_bytes=1 << 26))

    async def start(self) -> None:
        listener = bind("127.0.0.1", 0)
        await self.server.start(listener)
        self.url = local_url(*listener.getsockname()[:2])

    async def stop(self) -> None:
        await self.server.stop(drain_s=0)

    async def _handle(self, exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            data = [{"id": name, "owned_by": "someone"} for name in self.models]
            exchange.reply(msgspec.json.encode({"object": "list", "data": data}))
            return
        self.bodies.append(exchange.body)
        self.headers.append(exchange.headers)
        if self.status != 200:
            exchange.reply(b'{"error":{"message":"broken on purpose"}}', status=self.status)
        elif exchange.path == "/v1/audio/speech":
            await self._speak(exchange)
        elif exchange.path == "/v1/images/generations":
            picture = {"b64_json": base64.b64encode(PICTURE).decode()}
            count = json.loads(exchange.body).get("n", 1)
            exchange.reply(msgspec.json.encode({"created": 1, "data": [picture] * count}))
        elif exchange.path.startswith("/v1/workers/"):
            exchange.reply(exchange.body)
        else:
            form = parse_form(exchange.body, exchange.header("content-type"))
            sound = form.file("file")
            assert sound is not None
            reply = {"text": f"{len(sound.data)} bytes for {form.text('model')}"}
            exchange.reply(msgspec.json.encode(reply), headers=[("x-tonle-audio-seconds", "2.5")])

    async def _speak(self, exchange: Exchange) -> None:
        exchange.start(content_type="audio/wav", headers=[("x-tonle-audio-seconds", "1.5")])
        exchange.write(SPOKEN[:1000])
        if self.pause is not None:
            await self.pause.wait()
        if self.breaks:
            exchange._line.abort()  # type: ignore[attr-defined]
            return
        for _ in range(2000 if self.rambles else 0):
            exchange.write(SPOKEN[:1000])
            await asyncio.sleep(0.005)
        exchange.write(SPOKEN[1000:])
        exchange.end()


def in_front(tmp_path: Path, *upstreams: MediaUpstream, **settings: Any) -> Any:
    def rows() -> tuple[BackendConfig, ...]:
        return tuple(BackendConfig(url=each.url, name=f"b{place}") for place, each in enumerate(upstreams))

    return running_gateway(tmp_path, *upstreams, backends=rows, **settings)  # type: ignore[arg-type]


def form(model: str = "whisper", **fields: str) -> dict[str, Any]:
    return {"data": {"model": model, **fields}, "files": {"file": ("a.wav", SOUND, "audio/wav")}, "headers": AUTH}


async def transcribe(gateway: RunningGateway, model: str = "whisper") -> httpx.Response:
    request = gateway.client.build_request("POST", "/v1/audio/transcriptions", **form(model))
    await request.aread()  # so that its bytes can be compared
    return await gateway.client.send(request)


def client_of(url: str, key: str = KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def test_a_form_goes_to_the_backend_of_its_model_as_it_came(tmp_path: Path) -> None:
    async def main() -> None:
        speech, chat = MediaUpstream("whisper"), MediaUpstream("chatty")
        async with in_front(tmp_path, chat, speech) as gateway:
            client = client_of(gateway.url)
            told = await client.audio.transcriptions.create(model="whisper", file=("a.wav", SOUND), language="km")
            assert told.text == "102400 bytes for whisper"
            sent = await transcribe(gateway)
            assert sent.json() == {"text": "102400 bytes for whisper"} and sent.headers["x-tonle-backend"] == "b1"
            assert sent.request.content == speech.bodies[1]
            assert speech.headers[1]["content-type"] == sent.request.headers["content-type"]
            assert chat.bodies == []
            assert (await transcribe(gateway, "unknown")).status_code == 404
            assert (
                await gateway.client.post("/v1/audio/transcriptions", **form() | {"headers": {}})
            ).status_code == 401

    run(main())
    asked, again, unknown, no_key = read_records(tmp_path / "audit")
    file = {"filename": "a.wav", "content_type": "audio/wav", "size": len(SOUND), "sha256": digest(SOUND)}
    assert asked["parameters"]["language"] == "km"
    assert asked["parameters"]["file"] == file | {"content_type": asked["parameters"]["file"]["content_type"]}
    assert again["parameters"] == {"file": file}
    assert (again["model"], again["status"], again["output"]) == ("whisper", "ok", {"text": "102400 bytes for whisper"})
    assert again["usage"]["audio_seconds"] == 2.5 and again["route"]["backend"] == "b1"
    assert (unknown["status"], unknown["http_status"], unknown["parameters"]) == ("refused", 404, {"file": file})
    assert no_key["parameters"]["body"]["first"] == ""  # not a byte of the recording
    assert "media" not in again and not (tmp_path / "audit" / "media").exists()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_an_alias_is_rewritten_in_the_form_and_nothing_else(tmp_path: Path) -> None:
    async def main() -> None:
        speech = MediaUpstream("whisper")
        async with in_front(tmp_path, speech, aliases=(("whisper-1", "whisper"),)) as gateway:
            sent = await transcribe(gateway, "whisper-1")
            assert sent.json() == {"text": "102400 bytes for whisper"}
            assert speech.bodies == [sent.request.content.replace(b"whisper-1", b"whisper")]
            without = form()
            del without["data"]["model"]
            only = await gateway.client.post("/v1/audio/translations", **without)  # there is only one model
            assert only.json() == {"text": "102400 bytes for whisper"}

    run(main())


def test_a_backend_that_fails_is_replaced_and_a_form_has_fallbacks(tmp_path: Path) -> None:
    async def main() -> None:
        bad, good, other = MediaUpstream("whisper"), MediaUpstream("whisper"), MediaUpstream("small")
        async with in_front(tmp_path, bad, good, other, fallbacks=(("whisper", ("small",)),)) as gateway:
            bad.status = 500
            for _ in range(2):
                assert (await transcribe(gateway)).json() == {"text": "102400 bytes for whisper"}
            await good.stop()
            instead = await transcribe(gateway)
            assert instead.json() == {"text": "102400 bytes for small"}
            assert instead.headers["x-tonle-fallback"] == "small"

    run(main())
    assert len(read_records(tmp_path / "audit")) == 3


def test_speech_is_passed_on_as_it_comes(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = MediaUpstream("voice")
        upstream.pause = asyncio.Event()
        async with in_front(tmp_path, upstream, audit_media="store") as gateway:
            body = {"model": "voice", "input": "សួស្តី", "voice": "a", "use_cache": True, "seed": 1}
            async with gateway.client.stream("POST", "/v1/audio/speech", json=body, headers=AUTH) as reply:
                pieces = reply.aiter_raw()
                first = await anext(pieces)
                assert first == SPOKEN[:1000] and not upstream.pause.is_set()  # before the rest was made
                upstream.pause.set()
                assert first + b"".join([piece async for piece in pieces]) == SPOKEN
            assert reply.headers["content-type"] == "audio/wav" and reply.headers["x-cache"] == "bypass"
            client = client_of(gateway.url)
            async with client.audio.speech.with_streaming_response.create(model="voice", input="hi", voice="a") as said:
                assert await said.read() == SPOKEN
            assert len(upstream.bodies) == 2

    run(main())
    first, _ = read_records(tmp_path / "audit")
    assert first["prompt"] == "សួស្តី"
    assert first["output"] == {"content_type": "audio/wav", "size": len(SPOKEN), "sha256": digest(SPOKEN)}
    assert first["usage"]["audio_seconds"] == 1.5
    assert (tmp_path / "audit" / media_name(digest(SPOKEN))).read_bytes() == SPOKEN


def test_speech_that_breaks_off_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = MediaUpstream("voice")
        upstream.breaks, upstream.pause = True, asyncio.Event()
        async with in_front(tmp_path, upstream) as gateway:
            body = {"input": "hi", "voice": "a"}
            async with gateway.client.stream("POST", "/v1/audio/speech", json=body, headers=AUTH) as reply:
                pieces = reply.aiter_raw()
                assert await anext(pieces) == SPOKEN[:1000]
                upstream.pause.set()
                with pytest.raises(httpx.RemoteProtocolError):
                    await anext(pieces)
            upstream.breaks = False
            good = await gateway.client.post("/v1/audio/speech", json={"input": "hi", "voice": "a"}, headers=AUTH)
            assert good.content == SPOKEN

    run(main())
    broken, _ = read_records(tmp_path / "audit")
    assert broken["status"] == "failed" and broken["output"]["size"] == 1000


def test_who_leaves_in_the_middle_is_recorded_once(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = MediaUpstream("voice")
        upstream.rambles = True
        async with in_front(tmp_path, upstream) as gateway:
            async with gateway.client.stream("POST", "/v1/audio/speech", json={"input": "hi"}, headers=AUTH) as reply:
                await anext(reply.aiter_raw())
            trail = gateway.gateway.trail
            await until(lambda: trail is not None and not trail.num_open, "it is still open")

    run(main())
    (record,) = read_records(tmp_path / "audit")
    assert record["status"] == "cancelled" and 1000 <= record["output"]["size"] < 1_000_000


def test_pictures_are_described_in_the_record(tmp_path: Path) -> None:
    async def main() -> None:
        async with in_front(tmp_path, MediaUpstream("painter"), audit_media="none") as gateway:
            made = await client_of(gateway.url).images.generate(prompt="a river", model="painter", n=2)
            assert made.data is not None
            assert [base64.b64decode(each.b64_json or "") for each in made.data] == [PICTURE] * 2

    run(main())
    (record,) = read_records(tmp_path / "audit")
    assert record["output"]["data"] == [{"b64_json": {"size": len(PICTURE)}}] * 2  # no hashes wanted
    assert record["usage"]["images"] == 2 and record["prompt"] == "a river"


def test_a_worker_of_ones_own_gets_its_fields_as_they_are(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = MediaUpstream("shout", "other")
        async with in_front(tmp_path, upstream) as gateway:
            media = base64.b64encode(SOUND).decode()
            body = {"text": "hi", "n": "many", "cache_salt": 1, "max_tokens": "few", "media": [media]}
            reply = await gateway.client.post("/v1/workers/shout", json=body, headers=AUTH)
            assert reply.json() == body
            assert (await gateway.client.post("/v1/workers/none", json=body, headers=AUTH)).status_code == 400

    run(main())
    record, _ = read_records(tmp_path / "audit")
    described = [{"size": len(SOUND), "sha256": digest(SOUND)}]
    assert record["model"] == "shout" and record["parameters"]["media"] == described
    assert record["output"]["media"] == described


def test_uploads_have_a_bound_of_their_own(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = MediaUpstream("whisper")
        async with in_front(tmp_path, upstream, max_body_bytes=1000, max_upload_bytes=200_000) as gateway:
            assert (await transcribe(gateway)).status_code == 200
            large = form()
            large["files"]["file"] = ("a.wav", SOUND * 2, "audio/wav")
            refused = await gateway.client.post("/v1/audio/transcriptions", **large)
            assert refused.status_code == 413 and "--max-upload" in refused.json()["error"]["message"]
            text = await gateway.client.post("/v1/audio/speech", json={"input": "x" * 2000}, headers=AUTH)
            assert text.status_code == 413 and "--max-body" in text.json()["error"]["message"]
            reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
            head = (
                "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\n"
            )
            writer.write(
                f"{head}Authorization: Bearer {KEY}\r\nContent-Length: 4294967296\r\nExpect: 100-continue\r\n\r\n".encode()
            )
            assert (await reader.readline()).startswith(b"HTTP/1.1 413")  # nothing of it was sent
            writer.close()
            json_body = await gateway.client.post("/v1/audio/transcriptions", json={"model": "whisper"}, headers=AUTH)
            assert json_body.status_code == 415
            headers = AUTH | {"content-type": "multipart/form-data; boundary=zzz"}
            cut = await gateway.client.post("/v1/audio/transcriptions", content=b"--zzz\r\n" + SOUND, headers=headers)
            assert cut.status_code == 400

    run(main())
    assert all(SOUND[:50].hex() not in str(record).encode().hex() for record in read_records(tmp_path / "audit"))


def test_keys_have_limits_of_sound_and_pictures(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = MediaUpstream("whisper", "painter")
        async with in_front(tmp_path, upstream) as gateway:
            made = await gateway.post(
                "/admin/keys", {"name": "k", "audio_seconds_per_minute": 7, "images_per_minute": 3}
            )
            mine = {"authorization": f"Bearer {made.json()['key']}"}
            # 102,400 bytes are taken for 6.4 s and turn out to be 2.5: the second fits, too, and the third does not.
            for status in (200, 429):
                reply = await gateway.client.post("/v1/audio/transcriptions", **form() | {"headers": mine})
                assert reply.status_code == status, reply.text
            assert "7 seconds of sound per minute" in reply.json()["error"]["message"]
            assert 1 <= int(reply.headers["retry-after"]) <= 60
            picture = {"model": "painter", "prompt": "x", "n": 2}
            statuses = [
                (await gateway.client.post("/v1/images/generations", json=picture, headers=mine)).status_code
                for _ in range(2)
            ]
            assert statuses == [200, 429]
            spoken = {"model": "whisper", "input": "hello", "voice": "a"}
            assert (await gateway.client.post("/v1/audio/speech", json=spoken, headers=mine)).status_code == 200
            upstream.status = 400  # what was refused costs nothing
            one = {"model": "painter", "prompt": "x"}
            for _ in range(3):
                assert (await gateway.client.post("/v1/images/generations", json=one, headers=mine)).status_code == 400
            usage = await gateway.get("/dashboard/api/usage.csv")
            rows = {row["model"]: row for row in csv.DictReader(io.StringIO(usage.text)) if row["model"]}
            assert [(rows["whisper"][name], rows["painter"][name]) for name in ("audio_s", "characters", "images")] == [
                ("4.0", "0.0"), ("5", "0"), ("0", "2")
            ]  # fmt: skip

    run(main())
    records = read_records(tmp_path / "audit")
    assert [record["status"] for record in records[:4]] == ["ok", "refused", "ok", "refused"]
    assert [record["usage"]["characters"] for record in records if record["endpoint"] == "/v1/audio/speech"] == [5]


def test_media_is_stored_once_checked_and_goes_with_the_last_record(tmp_path: Path) -> None:
    async def main() -> None:
        async with in_front(tmp_path, MediaUpstream("whisper"), audit_media="store") as gateway:
            for _ in range(2):
                assert (await transcribe(gateway)).status_code == 200
            assert (await transcribe(gateway, "unknown")).status_code == 404  # of refused ones nothing is kept

    run(main())
    trail = tmp_path / "audit"
    path = trail / media_name(digest(SOUND))
    assert path.read_bytes() == SOUND and len([each for each in (trail / "media").rglob("*") if each.is_file()]) == 1
    report = verify(trail)
    assert (report.findings, report.num_media, report.num_records) == ([], 1, 3)

    path.write_bytes(SOUND[:-1] + b"!")
    assert [(each.problem, each.file) for each in verify(trail).findings] == [("edited", media_name(digest(SOUND)))]
    path.unlink()
    assert [each.problem for each in verify(trail).findings] == ["deleted"]
    path.write_bytes(SOUND)

    chain = Chain(trail, load_key(trail / "audit.key"))
    one, other = sorted(file for file in trail.glob("*/*transcriptions*.json") if b'"media"' in file.read_bytes())
    redact_records(chain, [one], removing(["parameters"]), reason="asked")
    assert path.exists() and verify(trail).findings == []  # the other record refers to it
    redact_records(chain, [other], removing(["output"]), reason="asked")
    assert not path.exists()
    report = verify(trail)
    assert (report.findings, report.num_media, report.num_redacted) == ([], 0, 2)


def test_recordings_are_not_stored_where_words_must_be_masked(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="audit_redact can find nothing"):
            async with in_front(tmp_path, MediaUpstream("whisper"), audit_media="store", audit_redact=("email",)):
                pass

    run(main())


def test_the_key_command_takes_the_limits(tmp_path: Path) -> None:
    state = ["--state-db", str(tmp_path / "state.db")]
    command = [sys.executable, "-m", "tonle", "keys"]
    wanted = ["--name", "k", "--audio-seconds-per-minute", "60", "--images-per-minute", "5"]
    subprocess.run([*command, "create", *wanted, *state], check=True, capture_output=True, timeout=120)
    listed = subprocess.run([*command, "list", "--json", *state], check=True, capture_output=True, timeout=120)
    limits = json.loads(listed.stdout)["keys"][0]["limits"]
    assert (limits["audio_seconds_per_minute"], limits["images_per_minute"]) == (60, 5)
