"""Who gave out an id: per owner, for a while, within bounds."""

from __future__ import annotations

from tonle.gateway.chains import Chains, Link, session_chain

LINK, LATER = Link("r1", "c1"), Link("r2", "c1")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_newest_id_that_is_known_counts_and_the_last_to_give_it_out() -> None:
    chains = Chains()
    chains.note("a", ["call_1"], LINK)
    chains.note("a", ["call_2"], LATER)
    assert chains.find("a", ["unknown", "call_2", "call_1"]) == LATER
    assert chains.find("a", ["call_1"]) == LINK
    chains.note("a", ["call_1"], LATER)
    assert chains.find("a", ["call_1"]) == LATER
    assert chains.num_ids == 2


def test_owners_do_not_see_each_other() -> None:
    chains = Chains()
    chains.note("a", ["call_1"], LINK)
    assert chains.find("b", ["call_1"]) is None


def test_ids_are_forgotten_after_a_while() -> None:
    clock = Clock()
    chains = Chains(ttl_s=10, clock=clock)
    chains.note("a", ["call_1"], LINK)
    clock.now_s = 9.9
    assert chains.find("a", ["call_1"]) == LINK
    clock.now_s = 10
    assert chains.find("a", ["call_1"]) is None
    assert chains.num_ids == 0


def test_the_ids_used_last_are_kept() -> None:
    chains = Chains(max_ids_of_owner=3)
    for number in range(3):
        chains.note("a", [f"call_{number}"], LINK)
    assert chains.find("a", ["call_0"])
    chains.note("a", ["call_3"], LINK)
    assert chains.find("a", ["call_1"]) is None
    assert chains.find("a", ["call_0"])
    assert chains.num_ids == 3


def test_one_owner_cannot_push_out_another_beyond_its_share() -> None:
    chains = Chains(max_ids=10, max_ids_of_owner=6)
    chains.note("small", ["call_1", "call_2"], LINK)
    chains.note("large", [f"call_{number}" for number in range(1000)], LINK)
    assert chains.find("small", ["call_1"])
    assert chains.num_ids == 8
    for number in range(100):  # many owners: the least recently used goes
        chains.note(f"owner {number}", ["call_1"], LINK)
        assert chains.find("small", ["call_1"])
        assert chains.num_ids <= 10
    assert chains.find("large", ["call_999"]) is None


def test_a_session_is_the_same_chain_everywhere_for_one_owner() -> None:
    assert session_chain("a", "s") == session_chain("a", "s")
    assert len({session_chain(owner, name) for owner in ("a", "b") for name in ("s", "t", "\ud800")}) == 6
