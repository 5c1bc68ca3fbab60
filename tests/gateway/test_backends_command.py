"""`tonle backends` against a running gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from tests.gateway.running_gateway import ADMIN, KEY, Upstream, run, running_gateway, until
from tonle.cli.app import app


def test_list_add_change_drain_resume_and_remove(tmp_path: Path) -> None:
    async def main() -> None:
        first, second = Upstream("m"), Upstream("n")
        await second.start()
        async with running_gateway(tmp_path, first) as place:

            async def said(*words: str, key: str = ADMIN) -> Result:
                """In this process: starting another for each takes longer than all the rest."""
                arguments = ["backends", *words, "--url", place.url]
                return await asyncio.to_thread(CliRunner().invoke, app, arguments, env={"OPENAI_API_KEY": key})

            done = await said("add", second.url, "--name", "two", "--weight", "2", "--region", "eu")
            assert done.exit_code == 0 and "Added two; kept in" in done.stderr, done.stderr
            await until(lambda: place.gateway.pool.named("two").is_up, "it is not probed")
            listed = (await said("list")).stdout
            assert "two" in listed and "settings" in listed and "admin" in listed and "healthy" in listed
            rows = {row["name"]: row for row in json.loads((await said("list", "--json")).stdout)["backends"]}
            assert rows["two"]["weight"] == 2 and rows["two"]["region"] == "eu"
            assert "Changed two, kept in" in (await said("change", "two", "--weight", "3")).stderr
            assert "until this gateway is restarted" in (await said("change", "b0", "--weight", "3")).stderr
            assert "two is drained; nothing runs there" in (await said("drain", "two")).stderr
            assert "two gets requests again" in (await said("resume", "two")).stderr
            assert "two leaves" in (await said("remove", "two")).stderr
            await until(lambda: place.gateway.pool.find("two") is None, "it is still there")
            missing = await said("remove", "two")
            assert missing.exit_code == 1 and "there is no backend 'two'" in missing.stderr
            refused = await said("remove", "b0", key=KEY)
            assert refused.exit_code == 1 and "may not manage this server" in refused.stderr
            assert (await said("change", "b0")).exit_code == 1
        await second.stop()

    run(main())
