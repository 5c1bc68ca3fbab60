"""Each routing policy alone: which candidates it keeps, and the reason it gives."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tonle.config.gateway import GatewayConfig
from tonle.config.routing import ArmConfig, BackendConfig
from tonle.gateway.api_keys.key import LOCAL_CALLER
from tonle.gateway.backends.backend import Backend, ModelEntry
from tonle.gateway.backends.backend_pool import BackendPool
from tonle.gateway.parsed_request import ParsedRequest
from tonle.gateway.refusals import NoBackend
from tonle.gateway.routing.policies import (
    LOAD_SLACK,
    ByLength,
    ByPrefix,
    ByRole,
    Candidates,
    RouteRequest,
    by_load,
    by_share,
    has_model,
    is_available,
    of_arm,
)
from tonle.gateway.routing.router import Router
from tonle.gateway.stage_results import AcceptedRequest, ResolvedModel


def backend(name: str, **fields: Any) -> Backend:
    row = BackendConfig(url=f"http://{name}:1", name=name, **{"models": ("m",), "kind": "openai", **fields})
    return Backend(row, GatewayConfig())


def request(
    text: str = "hello", *, prompt_tokens: int = 10, new_tokens: int = 1, arm: ArmConfig | None = None, failed: Any = ()
) -> RouteRequest:
    parsed = ParsedRequest(
        body={"prompt": text}, raw=b"", rewritten=False, warnings=(), asked_model="m", stream=False, wants_usage=False,
        adds_usage=False, prompt_tokens=prompt_tokens, new_tokens=new_tokens, priority=2, deadline_s=None, user=None,
        strict=False,
    )  # fmt: skip
    model = ResolvedModel("m", "m", ModelEntry(id="m"), 1, None if arm is None else "e", arm)
    call: Any = None
    return RouteRequest(AcceptedRequest(call, LOCAL_CALLER, parsed, model, "owner", "salt"), failed)


def for_adapter(text: str, digest: str) -> RouteRequest:
    wanted = request(text)
    entry = ModelEntry(id="a", parent="m", digest=digest)
    model = ResolvedModel("a", "a", entry, 1)
    return RouteRequest(msgspec.structs.replace(wanted.accepted, model=model), ())


def names(candidates: Candidates) -> list[str]:
    return [each.name for each in candidates.backends]


def busy(one: Backend, num_requests: float) -> Backend:
    one.gate.num_inside = int(num_requests)
    return one


def test_the_model_decides_first() -> None:
    a, b, other = backend("a"), backend("b"), backend("other", models=("n",))
    kept = has_model(Candidates([a, b, other], ""), request())
    assert (names(kept), kept.why) == (["a", "b"], "load")
    alone = has_model(Candidates([a, other], ""), request())
    assert (names(alone), alone.why) == (["a"], "only")


def test_only_available_backends_are_kept() -> None:
    healthy, ill, drained, paused, failed = (
        backend(name) for name in ("healthy", "ill", "drained", "paused", "failed")
    )
    ill.unhealthy_reason = "connection refused"
    drained.draining = True
    for _ in range(5):
        paused.breaker.fail()
    kept = is_available(Candidates([healthy, ill, drained, paused, failed], "load"), request(failed=[failed]))
    assert (names(kept), kept.why) == (["healthy"], "load")


def test_an_arm_may_name_its_backend() -> None:
    candidates = Candidates([backend("a"), backend("b")], "load")
    named = of_arm(candidates, request(arm=ArmConfig(name="x", weight=1, backend="b")))
    assert (names(named), named.why) == (["b"], "experiment")
    assert of_arm(candidates, request(arm=ArmConfig(name="x", weight=1))) is candidates
    assert of_arm(candidates, request()) is candidates


def test_prefill_backends_do_not_answer() -> None:
    p1, p2, d = backend("p1", role="prefill"), backend("p2", role="prefill"), backend("d", role="decode")
    busy(p1, 3)
    policy, candidates = ByRole(512), Candidates([p1, p2, d], "load")
    long = policy(candidates, request(prompt_tokens=512))
    assert names(long) == ["d"] and long.prefill is p2
    short = policy(candidates, request(prompt_tokens=511))
    assert names(short) == ["d"] and short.prefill is None
    assert names(policy(Candidates([p1], "only"), request())) == []
    embedded = policy(candidates, request(prompt_tokens=512, new_tokens=0))
    assert names(embedded) == ["d"] and embedded.prefill is None


def test_length_classes() -> None:
    short, long, any_length = backend("short", length="short"), backend("long", length="long"), backend("any")
    policy, candidates = ByLength(100), Candidates([short, long, any_length], "load", prefill=short)
    kept = policy(candidates, request(prompt_tokens=100))
    assert (names(kept), kept.why, kept.prefill) == (["long", "any"], "length", short)
    assert names(policy(candidates, request(prompt_tokens=99))) == ["short", "any"]
    only_short = Candidates([short], "only")
    assert policy(only_short, request(prompt_tokens=100)) is only_short  # none fits: any will do


def test_prompts_that_begin_alike_stay_together_until_it_is_too_busy() -> None:
    a, b = backend("a"), backend("b")
    policy, candidates = ByPrefix(), Candidates([a, b], "load")
    first = policy(candidates, request("long prefix " * 100 + "one"))
    assert first.why == "prefix"
    (home,) = first.backends
    assert policy(candidates, request("long prefix " * 100 + "two")).backends == [home]
    busy(home, 4 * LOAD_SLACK)
    assert policy(candidates, request("long prefix " * 100 + "three")) is candidates
    other = b if home is a else a
    busy(home, 0)
    assert policy(candidates, request("long prefix " * 100 + "four")).backends == [other]  # it has been computed there


def test_the_least_busy_by_weight() -> None:
    a, b, heavy = busy(backend("a"), 2), busy(backend("b"), 3), busy(backend("heavy", weight=4.0), 6)
    assert names(by_load(Candidates([a, b, heavy], "load"), request())) == ["heavy"]


def test_the_router_applies_them_in_order_and_explains_itself() -> None:
    a, b = backend("a", length="short"), backend("b", length="long")
    router = Router(BackendPool([a, b], probe_interval_s=0), GatewayConfig())
    assert [getattr(policy, "__name__", type(policy).__name__) for policy in router.policies] == [
        "has_model", "is_available", "not_passed", "of_arm", "ByRole", "by_share", "ByLength", "ByPrefix", "by_load"]  # fmt: skip
    route = router.choose(request().accepted, [])
    assert (route.backend, route.why) == (a, "length")
    route = router.choose(request().accepted, [a])
    assert (route.backend, route.why) == (b, "load")
    b.unhealthy_reason = "connection refused"
    with pytest.raises(NoBackend, match=r"no healthy backend for m: a failed; b is unhealthy \(connection refused\)"):
        router.choose(request().accepted, [a])


def test_a_prefix_that_one_adapter_computed_is_no_use_to_another() -> None:
    """Each content has homes of its own, and keeps them: 64 prompts would hardly agree on two backends by chance."""
    backends, policy = [backend("a"), backend("b")], ByPrefix()
    candidates = Candidates(backends, "load")
    prompts = [f"prompt {number} " * 40 for number in range(64)]

    def homes(make: Any) -> list[list[str]]:
        return [names(policy(candidates, make(text))) for text in prompts]

    base = homes(request)
    one, two = (homes(lambda text, d=digest: for_adapter(text, d * 64)) for digest in "ab")
    assert base != one != two != base
    assert homes(lambda text: for_adapter(text, "a" * 64)) == one and homes(request) == base


def test_a_share_is_kept_to_the_request_and_others_get_the_rest() -> None:
    canary, a, b = backend("canary", share=0.1), backend("a"), backend("b")
    sent = [by_share(Candidates([canary, a, b], "load"), request()) for _ in range(200)]
    assert sum(names(each) == ["canary"] for each in sent) == 20
    assert all(names(each) in (["canary"], ["a", "b"]) for each in sent)
    assert {each.why for each in sent if names(each) == ["canary"]} == {"share"}


def test_a_share_of_nothing_gets_nothing_and_without_others_everything() -> None:
    none, a = backend("none", share=0.0), backend("a")
    assert all(names(by_share(Candidates([none, a], "load"), request())) == ["a"] for _ in range(50))
    assert names(by_share(Candidates([none], "load"), request())) == ["none"]
    assert names(by_share(Candidates([a], "load"), request())) == ["a"]


def test_a_second_attempt_does_not_count_for_a_share() -> None:
    canary, a, b = backend("canary", share=0.5), backend("a"), backend("b")
    assert all(names(by_share(Candidates([canary, b], "load"), request(failed=[a]))) == ["b"] for _ in range(10))
    assert canary.owed_share == 0.0
