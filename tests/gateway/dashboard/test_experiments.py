"""Experiments at run time: the report, stop and start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateway.dashboard.pages import make_key
from tests.gateway.running_gateway import KEY, Upstream, run, running_gateway, until
from tonle.config.routing import ArmConfig, ExperimentConfig
from tonle.gateway import experiments

EXPERIMENT = ExperimentConfig(
    name="new/adapter", model="alias",
    arms=(ArmConfig(name="control", weight=1, model="m"), ArmConfig(name="canary", weight=1, model="m")),
)  # fmt: skip
PATH = "/admin/experiments"


def test_the_report_comes_from_the_trail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "FRESH_S", 0.0)

    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), experiments=(EXPERIMENT,)) as place:
            (before,) = (await place.get(PATH)).json()["experiments"]
            assert (before["name"], before["running"], before["share"]) == ("new/adapter", True, 1.0)
            assert [arm["name"] for arm in before["arms"]] == ["control", "canary"]
            assert [arm["requests"] for arm in before["report"]["arms"]] == [0, 0]
            for number in range(40):
                await place.ask(model="alias", user=f"user {number}")
            trail = place.gateway.trail
            assert trail is not None
            await until(lambda: trail.stats.written >= 40, "records are not written")
            (after,) = (await place.get(PATH)).json()["experiments"]
            arms = {arm["name"]: arm for arm in after["report"]["arms"]}
            assert sum(arm["requests"] for arm in arms.values()) == 40 and all(arm["requests"] for arm in arms.values())
            assert arms["control"]["output_tokens"] == 3.0 and arms["control"]["failure_interval"][0] == 0.0
            found = {each["measure"]: each for each in after["report"]["comparisons"]}
            assert set(found) >= {"failure_rate", "latency_ms", "output_tokens"}
            latency = found["latency_ms"]
            assert latency["difference"] == pytest.approx(latency["value"] - latency["control"])
            assert latency["interval"][0] <= latency["difference"] <= latency["interval"][1]
            assert after["report"]["complete"] is True

    run(main())


def test_an_arm_may_name_an_alias(tmp_path: Path) -> None:
    arms = (ArmConfig(name="control", weight=0, model="m"), ArmConfig(name="canary", weight=1, model="newest"))
    experiment = ExperimentConfig(name="trial", model="trial", arms=arms)

    async def main() -> None:
        upstream = Upstream("m", "n")
        async with running_gateway(tmp_path, upstream, aliases=(("newest", "n"),), experiments=(experiment,)) as place:
            reply = await place.ask(model="trial")
            assert (reply.status_code, upstream.requests[-1]["model"]) == (200, "n"), reply.text

    run(main())


def test_a_stopped_experiment_takes_no_part(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), experiments=(EXPERIMENT,)) as place:
            reader = (await make_key(place, "dashboard"))["key"]
            assert (await place.get(PATH, key=reader)).status_code == 200
            for key, status in ((reader, 403), (KEY, 403), ("wrong", 401)):
                assert (await place.post(f"{PATH}/new/adapter/stop", key=key)).status_code == status
            assert (await place.get(PATH, key=KEY)).status_code == 403
            assert (await place.ask(model="alias", user="a")).status_code == 200
            stopped = await place.post(f"{PATH}/new/adapter/stop")
            assert (stopped.status_code, stopped.json()["running"]) == (200, False)
            assert (await place.ask(model="alias", user="a")).status_code == 200  # the name still leads to a model
            assert (await place.post(f"{PATH}/new%2Fadapter/start")).json()["running"] is True
            assert (await place.ask(model="alias", user="a")).status_code == 200
            for name in ("other", "", "new"):
                missing = await place.post(f"{PATH}/{name}/stop")
                assert missing.status_code == 404, name
        arms = [record["experiment"] and record["experiment"]["name"] for record in place.records() if record["model"]]
        assert arms == ["new/adapter", None, "new/adapter"]

    run(main())
