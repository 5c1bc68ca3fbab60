"""An explanation with a real engine: a long prompt ahead of a short one is named, by a server and by the gateway before it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tests.fakes.checkpoints import save_folder
from tests.fakes.server import Server, tonle_serve
from tests.gateway.running_gateway import ADMIN, KEY, RunningGateway, run, running_gateway, until
from tests.unit.cli.terminal import tonle
from tonle.cli.app import app
from tonle.config.routing import BackendConfig

COMPLETIONS = "/v1/completions"
LONG = 6000  # tokens
ATTEMPTS = 8


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A step computes 64 tokens, and one prompt may take them all: who comes second waits for the first one's prompt."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_folder("llama", folder, max_position_embeddings=8192)
    flags = (
        "--kv-cache-memory", "64MiB", "--max-num-seqs", "4", "--max-num-batched-tokens", "64",
        "--long-prefill-token-threshold", "64", "--trust-salt", "--served-model-name", "m",
    )  # fmt: skip
    with tonle_serve(folder, *flags) as server:
        yield server


@contextlib.asynccontextmanager
async def behind(folder: Path, replica: Server) -> AsyncIterator[RunningGateway]:
    rows = (BackendConfig(url=replica.url, name="r0"),)
    async with running_gateway(folder, backends=lambda: rows, cache=None) as place:
        yield place


async def complete(
    place: RunningGateway, request_id: str, prompt: list[int], key: str, **fields: Any
) -> httpx.Response:
    reply = await place.ask(
        path=COMPLETIONS, key=key, headers={"x-request-id": request_id}, messages=None, prompt=prompt, temperature=0,
        ignore_eos=True, **fields,
    )  # fmt: skip
    assert reply.status_code == 200, reply.text
    return reply


async def num_running(client: httpx.AsyncClient, replica: Server) -> float:
    text = (await client.get(f"{replica.url}/metrics")).text
    found = re.search(r"(?m)^vllm:num_requests_running\S* (\S+)$", text)
    assert found is not None
    return float(found[1])


async def overlap(place: RunningGateway, replica: Server, attempt: int, long_key: str) -> None:
    """A long prompt, and a short one that comes while the engine computes it."""
    prompt = [3 + (attempt * 31 + place_of * 7) % 300 for place_of in range(LONG)]  # not in the prefix cache
    long = asyncio.create_task(complete(place, f"long-{attempt}", prompt, long_key, max_tokens=2))
    while not long.done() and not await num_running(place.client, replica):  # it ends, one way or the other
        continue
    await complete(place, f"short-{attempt}", [5, 6, 7, 8 + attempt], KEY, max_tokens=3, stream=True)
    await long


async def explained(place: RunningGateway, request_id: str, key: str) -> dict[str, Any]:
    observed = place.gateway.observed
    assert observed is not None
    await until(lambda: observed.request_log.find(request_id), f"{request_id} is not remembered")
    reply = await place.get(f"/v1/requests/{request_id}/explain", key=key)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    assert sum(span["seconds"] for span in found["spans"]) == pytest.approx(found["total_s"])
    return found


def waited(found: dict[str, Any]) -> str:
    return next((said for said in found["sentences"] if "waited behind" in said), "")


def test_what_a_request_waited_behind_is_named(tmp_path: Path, replica: Server) -> None:
    async def main() -> None:
        async with behind(tmp_path, replica) as place:
            other = (await place.post("/admin/keys", {"name": "b"})).json()["key"]
            for attempt in range(ATTEMPTS):  # the long one may have been computed before the short one came
                await overlap(place, replica, attempt, other)
                found = await explained(place, f"short-{attempt}", ADMIN)
                if waited(found):
                    break
            long = f"long-{attempt}"
            assert re.fullmatch(
                rf"[\d.,]+ m?s of [\d.,]+ m?s: waited behind a 6,000-token prompt of key b \({long}\)\.", waited(found)
            ), found["sentences"]
            assert [each["request_id"] for each in found["engine"]["behind"]] == [long]
            names = [span["name"] for span in found["spans"]]
            assert "engine queue" in names and names.index("engine queue") < names.index("prefill")
            to_me = await explained(place, f"short-{attempt}", KEY)
            assert waited(to_me).endswith("waited behind a 6,000-token prompt of another key.")
            assert long not in str(to_me)
            its_own = await explained(place, long, other)
            assert its_own["engine"]["computed_tokens"] == LONG and its_own["engine"]["num_chunks"] >= LONG // 64
            assert its_own["engine"]["missed"].get("new", 0) > LONG - 64

    run(main())


def test_the_server_itself_tells_no_names_without_keys(replica: Server) -> None:
    """What another server asks of it with its salt is in the test above."""
    with httpx.Client(base_url=replica.url, timeout=60) as client:
        body = {"model": "m", "prompt": "the quick brown fox", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        request_id = client.post(COMPLETIONS, json=body).headers["x-request-id"]
        found = {}
        for _ in range(200):
            reply = client.get(f"/v1/requests/{request_id}/explain")
            if reply.status_code == 200:
                found = reply.json()
                break
        assert sum(span["seconds"] for span in found["spans"]) == pytest.approx(found["total_s"])
        assert found["engine"]["computed_tokens"] > 0 and found["request"]["completion_tokens"] == 4
        assert client.get("/v1/requests/none/explain").status_code == 404


def test_on_the_command_line(replica: Server) -> None:
    body = {"model": "m", "prompt": [9] * 600, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    with httpx.Client(base_url=replica.url, timeout=60) as client:
        request_id = client.post(COMPLETIONS, json=body).headers["x-request-id"]
        for _ in range(200):
            if client.get(f"/v1/requests/{request_id}/explain").status_code == 200:
                break
    where, width = ["--url", replica.url], {"COLUMNS": "120"}
    done = tonle("explain", request_id, *where, **width)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{request_id}: /v1/completions, m, ok (200), ")
    assert [line for line in lines if line.startswith("decode") and "30 tokens" in line and "█" in line]
    assert [line for line in lines if line.startswith("- ") and "prompt tokens" in line]
    raw = CliRunner().invoke(app, ["explain", request_id, *where, "--json"])
    assert raw.exit_code == 0 and '"object": "request.explanation"' in raw.stdout
    missing = CliRunner().invoke(app, ["explain", "req-none", *where])
    assert missing.exit_code == 1 and missing.stderr.startswith("Error: the server answered 404: there is no request")
