"""From the replicas there are to those there should be: the steps, and that they arrive without a gap."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonle.scaleout.reconcile import ReplicaFacts, State, Steps, reconcile


def facts(text: str) -> list[ReplicaFacts]:
    """`N+`: new and ready, `o-`: old and starting, `n~`: new, draining; the number of requests may follow."""
    states: dict[str, State] = {"+": "ready", "-": "starting", "~": "draining"}
    return [
        ReplicaFacts(
            id=f"{word}/{number}", version=word[0], state=states[word[1]], requests=int(word[2:] or 0), age_s=number
        )
        for number, word in enumerate(text.split())
    ]


@pytest.mark.parametrize(
    ("there", "wanted", "surge", "start", "drain"),
    [
        ("", 2, 1, 2, []),
        ("n+ n+", 2, 1, 0, []),
        ("n-", 2, 1, 1, []),
        ("n+5 n+1 n+9", 2, 1, 0, ["n+1/1"]),
        ("n+5 n- n+9", 2, 1, 0, ["n-/1"]),  # one that does not answer yet goes first
        ("o+ o+", 2, 1, 1, []),  # a new one is there before an old one goes
        ("o+ o+ n-", 2, 1, 0, []),
        ("o+3 o+1 n+", 2, 1, 1, ["o+1/1"]),
        ("o+ o+", 2, 2, 2, []),
        ("o+ n+ n+", 2, 1, 0, ["o+/0"]),
        ("o- n+", 2, 1, 1, ["o-/0"]),
        ("o+ o+", 2, 0, 1, ["o+/0"]),  # no GPU to spare
        ("o+ n-", 2, 0, 0, []),  # one at a time
        ("o+", 1, 0, 1, []),  # the only one stays until the new one is ready
        ("o+ o+ o+", 1, 1, 1, ["o+/0", "o+/1"]),
        ("n~ n~", 1, 1, 1, []),
    ],
)
def test_steps(there: str, wanted: int, surge: int, start: int, drain: list[str]) -> None:
    assert reconcile(facts(there), wanted, "n", surge) == Steps(start, tuple(drain))


words = st.sampled_from(["n+", "n-", "o+", "o-", "n~", "o~", "p+"])


@given(st.lists(words, max_size=8), st.integers(1, 6), st.integers(0, 3))
def test_it_arrives_without_a_gap(there: list[str], wanted: int, surge: int) -> None:
    """Follow the steps in a world where starts succeed and drained replicas go: in the end there are `wanted` new ones, and on
    the way never fewer ready ones than there were, or are wanted (one fewer where nothing may be spare)."""
    replicas = {each.id: each for each in facts(" ".join(there))}
    num_ready = sum(each.state == "ready" for each in replicas.values())
    least = min(num_ready, wanted) - (1 if surge == 0 and wanted > 1 else 0)
    for turn in range(60):
        steps = reconcile(list(replicas.values()), wanted, "n", surge)
        for id in steps.drain:
            replicas[id] = replace(replicas[id], state="draining")
        serving = [each for each in replicas.values() if each.state == "ready"]
        assert len(serving) >= least
        for number in range(steps.start):
            new = ReplicaFacts(id=f"{turn}.{number}", version="n", state="starting")
            replicas[new.id] = new
        staying = [each for each in replicas.values() if each.state != "draining"]
        assert len(staying) <= max(wanted + max(surge, 1 if wanted == 1 else 0), len(there))
        if steps == Steps() and all(each.state == "ready" for each in staying):
            break
        # One thing happens: the oldest start succeeds, or a drained one is gone.
        starting = next((each for each in replicas.values() if each.state == "starting"), None)
        if starting is not None:
            replicas[starting.id] = replace(starting, state="ready")
        for id in [id for id, each in replicas.items() if each.state == "draining"]:
            del replicas[id]
    staying = [each for each in replicas.values() if each.state != "draining"]
    assert len(staying) == wanted
    assert all(each.version == "n" and each.state == "ready" for each in staying)
