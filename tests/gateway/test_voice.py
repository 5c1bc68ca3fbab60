"""A spoken conversation through the gateway: one chain in the trail, every leg explained, interruptions that reach backends."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from examples import voice

from tests.fakes.voice_server import MODELS, QUESTION, SENTENCES, VoiceServer, voice_server, wav_head
from tests.gateway.running_gateway import KEY, RunningGateway, read_records, run, running_gateway
from tonle.audit.verify import verify
from tonle.config.routing import BackendConfig

CHAT, SPEECH, TRANSCRIPTION = "/v1/chat/completions", "/v1/audio/speech", "/v1/audio/transcriptions"
SOUND = wav_head(3200) + bytes(3200)


@contextlib.asynccontextmanager
async def talking(folder: Path) -> AsyncIterator[tuple[VoiceServer, RunningGateway, httpx.AsyncClient]]:
    """A gateway in front of the three models, and a caller with a key."""
    async with voice_server() as server:
        row = BackendConfig(url=server.url, name="speech")
        async with running_gateway(folder, backends=lambda: (row,)) as gateway:
            headers = {"authorization": f"Bearer {KEY}"}
            async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=60) as client:
                yield server, gateway, client


def legs_of(folder: Path) -> list[dict[str, object]]:
    """Their records; others are of lists and explanations."""
    return [record for record in read_records(folder / "audit") if record["endpoint"] in (CHAT, SPEECH, TRANSCRIPTION)]


def test_a_conversation_is_one_chain_and_every_leg_is_explained(tmp_path: Path) -> None:
    async def main() -> None:
        async with talking(tmp_path) as (server, _, client):
            models = await voice.find_models(client, None, None, None)
            assert models == voice.Models("ears", "llm", "mouth")
            timeline = voice.Timeline()
            program = voice.Voice(client, models)
            answer = await program.answer(SOUND, voice.WavWriter(io.BytesIO()), timeline)
            assert answer == " ".join(SENTENCES)
            assert [asked.json["input"] for asked in server.of(SPEECH)] == SENTENCES
            assert len({leg.request_id for leg in timeline.legs}) == 5
            for leg, line in zip(timeline.legs, await voice.explained(client, timeline), strict=True):
                assert line.startswith(f"{leg.name}: ") and "no such request" not in line
            other = voice.Voice(client, models)
            await other.answer(SOUND, voice.WavWriter(io.BytesIO()), voice.Timeline())
        records = legs_of(tmp_path)
        chains = [record["chain_id"] for record in records]
        assert len(records) == 10 and len(set(chains)) == 2  # one of each conversation
        assert all(chains.count(chain) == 5 for chain in chains)
        assert [record["endpoint"] for record in records[:3]] == [TRANSCRIPTION, CHAT, SPEECH]
        assert {record["status"] for record in records} == {"ok"}
        assert QUESTION in str(records[0])
        assert verify(tmp_path / "audit").ok

    run(main())


def test_an_interruption_reaches_the_backend_and_the_trail(tmp_path: Path) -> None:
    async def main() -> None:
        async with talking(tmp_path) as (server, _, client):
            server.text.clear()
            server.speech.clear()
            program = voice.Voice(client, voice.Models("ears", "llm", "mouth"))
            answer = asyncio.create_task(program.answer(SOUND, voice.WavWriter(io.BytesIO()), voice.Timeline()))
            await server.until(SPEECH)
            answer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await answer
            await server.until(CHAT, state="hung up")
            await server.until(SPEECH, state="hung up")
        records = legs_of(tmp_path)
        assert {record["endpoint"]: record["status"] for record in records} == {
            TRANSCRIPTION: "ok", CHAT: "cancelled", SPEECH: "cancelled",
        }  # fmt: skip
        assert len({record["chain_id"] for record in records}) == 1

    run(main())


def test_the_gateway_lists_which_models_are_pools_and_what_they_tell(tmp_path: Path) -> None:
    async def main() -> None:
        async with talking(tmp_path) as (server, _, client):
            listed = {entry["id"]: entry for entry in (await client.get("/v1/models")).json()["data"]}
            assert {name: entry.get("kind") for name, entry in listed.items()} == {
                entry["id"]: entry.get("kind") for entry in server.models
            }
            assert "kind" not in listed["llm"] and listed["mouth"]["facts"] == MODELS[2]["facts"]

    run(main())
