"""A spoken conversation with a real server: a recognizer, a language model and a synthesizer, each in its own process."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import wave
from pathlib import Path

import httpx
import pytest
from examples import voice

from tests.fakes.checkpoints import save_folder
from tests.fakes.server import tonle_serve
from tests.gateway.running_gateway import read_records

NEEDED = ("soundfile", "pocketsphinx", "espeakng_loader")
QUESTION = {"input": "What is the capital of Cambodia?", "model": "tts", "response_format": "wav"}


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason="needs pip install 'tonle[speech]'"
)
def test_a_question_is_heard_answered_and_spoken(tmp_path: Path) -> None:
    save_folder("llama", tmp_path / "tiny")
    (tmp_path / "tiny/generation_config.json").write_text('{"max_new_tokens": 24}')  # it was never taught to end
    flags = ("--worker", "asr", "--worker", "tts", "--audit-dir", str(tmp_path / "audit"), "--device", "cpu")
    timeline, file = voice.Timeline(), io.BytesIO()

    async def talk(url: str) -> str:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            models = await voice.find_models(client, None, None, None)
            assert (models.asr, models.tts) == ("asr", "tts")
            spoken = await client.post("/v1/audio/speech", json=QUESTION)
            out = voice.WavWriter(file)
            answer = await voice.Voice(client, models).answer(spoken.content, out, timeline)
            out.close()
            assert all(": " in line for line in await voice.explained(client, timeline))
            return answer

    with tonle_serve(tmp_path / "tiny", *flags) as server:
        answer = asyncio.run(talk(server.url))
    assert "capital" in timeline.legs[0].text
    assert answer
    speech = [leg for leg in timeline.legs if leg.name == "speech"]
    with wave.open(io.BytesIO(file.getvalue())) as sound:
        assert (sound.getnframes() > 0) == bool(speech)
    asked = {leg.request_id for leg in timeline.legs}
    records = [record for record in read_records(tmp_path / "audit") if record["request_id"] in asked]
    assert len(records) == len(timeline.legs) >= 2
    assert len({record["chain_id"] for record in records}) == 1
