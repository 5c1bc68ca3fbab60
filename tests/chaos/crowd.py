"""A thousand streams at the same time: straight to `tonle serve`, and through a gateway. All of them must complete.

Does: a server of a tiny model, a gateway whose queue holds them all, one asyncio client for all streams; two rows. Does
not: harm anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path

from tests.chaos.client import CHAT, KEY, Outcome, chat_body, head
from tests.chaos.load import Load, wait_until
from tests.chaos.programs import TONLE, Program
from tests.chaos.rows import Row
from tests.chaos.trail import Trail
from tests.chaos.trial import MEMORY_S, MEMORY_SHARE

NUM_STREAMS = 1000
WARM_UP = 500
TIMEOUT_S = 180.0


def crowd_rows(folder: Path, model: Path) -> list[Row]:
    with contextlib.ExitStack() as stack:
        command = [*TONLE, "serve", str(model), "--served-model-name", "m", "--kv-cache-memory", "64MiB", "--device", "cpu",
                   "--max-num-seqs", "64", "--api-key", KEY, "--audit-dir", str(folder / "audit-server"),
                   "--log-level", "WARNING"]  # fmt: skip
        server = Program("crowd-server", command, folder)
        server.start()
        stack.callback(server.stop)
        command = [*TONLE, "gateway", "--config", str(folder / "crowd.yaml")]
        (folder / "crowd.yaml").write_text(
            f"api_key: [{KEY}]\nstate_db: {folder}/crowd.db\naudit_dir: {folder}/audit-gateway\nlog_level: WARNING\n"
            f"max_concurrent: 256\nmax_queued: {NUM_STREAMS}\n"
            f"backends:\n  - {{name: server, url: '{server.url}', api_key: {KEY}}}\n"
        )
        gateway = Program("crowd-gateway", command, folder)
        gateway.start()
        stack.callback(gateway.stop)
        return [
            _row("1000-streams-server", server, Trail(folder / "audit-server")),
            _row("1000-streams-gateway", gateway, Trail(folder / "audit-gateway")),
        ]


def _row(name: str, program: Program, trail: Trail) -> Row:
    row, began_s = Row(name), time.monotonic()
    load = Load(program.port, f"{name}-warm", num_callers=16, max_tokens=8)
    load.start()
    load.wait_answered(WARM_UP, TIMEOUT_S)
    load.stop()
    calm_mb = program.memory_mb()
    row.outcomes = asyncio.run(_all(program.port, f"{name}-first"))
    before_mb, start_s = program.memory_mb(), time.monotonic()  # it keeps room for as many as it once had
    row.outcomes += asyncio.run(_all(program.port, name))
    took_s = time.monotonic() - start_s
    ids = [outcome.request_id for outcome in row.outcomes]
    trail.settle(ids)
    row.num_owed, row.num_records = len(ids), sum(len(trail.statuses(each)) for each in ids)
    row.verify = trail.verify()
    ok = wait_until(lambda: program.memory_mb() <= MEMORY_SHARE * before_mb, MEMORY_S)
    row.memory = f"{calm_mb:.0f}, after the first thousand {before_mb:.0f} → {program.memory_mb():.0f}"
    most = max((outcome.latency_s for outcome in row.outcomes), default=0.0)
    row.note = f"twice; all connected before the first was asked for; {took_s:.0f} s, the longest stream {most:.0f} s"
    row.red += [f"memory did not come back: {row.memory} MB"] if not ok else []
    row.red += [f"verify: {row.verify}"] if row.verify != "in order" else []
    if row.count("answered") != len(ids):
        row.red.append(
            f"{row.count('answered')} of {len(ids)} completed: {row.reasons('lost') or row.reasons('refused')}"
        )
    row.red += [f"{row.num_records} records of {row.num_owed}"] if row.num_records != row.num_owed else []
    row.took_s = time.monotonic() - began_s
    return row


async def _all(port: int, name: str) -> list[Outcome]:
    """Every connection is open before the first request is sent."""
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(NUM_STREAMS)]
    tasks = [_one(f"{name}-{number}", *each) for number, each in enumerate(opened)]
    return list(await asyncio.gather(*tasks))


async def _one(request_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Outcome:
    outcome = Outcome(request_id, "lost", sent_s=time.monotonic())
    body = json.dumps(chat_body("hello", stream=True, max_tokens=16, ignore_eos=True)).encode()
    writer.write(head(CHAT, request_id, len(body)) + body)
    seen = b""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while piece := await reader.read(65536):
                seen = seen[-200:] + piece
                if b"data: [DONE]" in seen:
                    outcome.kind = "answered"
                    break
    except (TimeoutError, OSError) as error:
        outcome.detail = f"{type(error).__name__} "
    if outcome.kind == "lost":
        is_refusal = b'"error"' in seen and b'"message"' in seen
        outcome.kind = "refused" if is_refusal else "lost"
        outcome.detail += repr(seen[-120:])
    outcome.ended_s = time.monotonic()
    writer.close()
    return outcome
