"""Whose text guesses come from, how many are made, and when none is."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from tonle.engine.plan import Plan
from tonle.engine.request import Request, ResolvedConfig
from tonle.engine.schedule import Sequence
from tonle.engine.speculate import Speculator
from tonle.engine.speculate.draft_cost import RelativeDraftCost
from tonle.engine.speculate.hit_rates import HitRates
from tonle.engine.speculate.recent_answers import RecentAnswers
from tonle.engine.speculate.speculator import OwnText

COPIED = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


def sequence(tokens: list[int], salt: bytes = b"", num_prompt: int = 1) -> Sequence:
    request = Request(handle=1, prompt=tokens[:num_prompt], config=ResolvedConfig(max_length=500), salt=salt)
    made = Sequence(request, key=0.0, stops=frozenset())
    made.tokens += tokens[num_prompt:]
    return made


def step(rows: int, guesses: int = 0) -> Plan:
    plan = Plan(rows=list(range(rows)), starts=[100] * rows, chunks=[[0]] * rows)
    if guesses:
        plan.drafts, plan.chunks[0] = {0: guesses}, [0] * (1 + guesses)
    return plan


def taught(base_s: float, row_s: float, guess_s: float, rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)) -> Speculator:
    """One that has seen what steps take."""
    speculator = Speculator(32, 512)
    for _ in range(40):
        for count in rows:
            for guesses in (0, 4):
                speculator.step_ended(step(count, guesses), base_s + count * row_s + guesses * guess_s, guesses)
    return speculator


def guesses_of(speculator: Speculator, made: Sequence, rows: int = 1, most: int = 32) -> list[int]:
    return speculator.propose(made, most) if speculator.begin_step(step(rows)) else []


def test_guesses_come_from_the_text_itself() -> None:
    speculator = taught(0.01, 0.001, 0.0005)
    made = sequence([1, *COPIED, 5, *COPIED[:5]])
    found = guesses_of(speculator, made)
    assert found and found == [*COPIED[5:], 5, *COPIED[:5]][: len(found)]


def test_no_guess_comes_from_another_tenant() -> None:
    """Each tenant's answers go on with tokens of its own after the same beginnings: a guess tells whose text it is from."""
    rng = random.Random(4)
    speculator = taught(0.01, 0.001, 0.0001)
    tenants = {f"tenant {number}".encode(): 1000 * (1 + number) for number in range(5)}
    num_guesses = 0
    for _ in range(300):
        salt, base = rng.choice(list(tenants.items()))
        beginning = rng.choice([COPIED[:4], COPIED[3:8], COPIED])
        asked = sequence([base, *beginning], salt)
        for guess in (found := guesses_of(speculator, asked)):
            assert guess in COPIED or base <= guess < base + 1000, "a guess from another tenant's text"
        num_guesses += sum(guess >= 1000 for guess in found)
        asked.tokens += [base + rng.randrange(3) for _ in range(20)]
        speculator.ended(asked)
        assert asked.own_text is None
    assert num_guesses > 100
    speculator.answers.add(b"tenant 0", [1, 2, 3, 777, 778] * 4)
    assert guesses_of(speculator, sequence([9, 1, 2, 3], b"tenant 0"))[0] == 777
    assert guesses_of(speculator, sequence([9, 1, 2, 3], b"tenant 1")) == []
    assert guesses_of(speculator, sequence([9, 1, 2, 3], b"")) == []


def test_the_store_is_bounded_and_drops_the_oldest() -> None:
    store = RecentAnswers(max_tenant=200, max_all=500)
    for number in range(100):
        store.add(b"one", [number * 10 + place for place in range(10)])
    tenant = store.of(b"one")
    assert tenant is not None and len(store) == len(tenant) <= 200 + 20
    assert tenant.find([0, 1, 2]) is None and tenant.find([990, 991, 992]) is not None
    for number in range(20):
        store.add(b"tenant %d" % number, list(range(100)))
    assert len(store) <= 500 and store.of(b"one") is None and store.of(b"tenant 19") is not None
    store.add(b"long", list(range(10_000)))
    assert len(store) <= 500


@pytest.mark.parametrize(("tenants", "length"), [(40_000, 8), (20, 16_000)])
def test_the_store_takes_no_more_memory_than_is_said(tenants: int, length: int) -> None:
    rng = random.Random(0)
    tracemalloc.start()
    try:
        store = RecentAnswers()
        for number in range(tenants):
            store.add(b"tenant %d" % number, [rng.randrange(50_000) for _ in range(length)])
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(store) > 250_000 and taken < 50e6


def test_the_index_of_a_long_answer_is_bounded_and_goes_on_to_guess() -> None:
    """A text that repeats after 50 tokens is guessed right at each look, but for those that make the index anew."""
    speculator, made = taught(0.01, 0.0005, 0.0001), sequence([1])
    largest = num_wrong = 0
    for number in range(100_000):
        made.tokens.append(100 + number % 50)
        if number % 10 == 0:
            found = guesses_of(speculator, made)
            num_wrong += found[:1] != [100 + (number + 1) % 50]
            largest = max(largest, len(made.own_text.index))
    assert largest <= 32_768 + 10
    assert num_wrong < 200


@pytest.mark.parametrize(
    ("row_s", "guess_s", "rows", "pays"),
    [(0.0005, 0.0005, 1, True), (0.003, 0.003, 1, True), (0.003, 0.003, 32, False), (0.003, 0.0005, 32, True),
     (0.0005, 0.02, 1, False)],
)  # fmt: skip
def test_guesses_are_made_where_they_pay(row_s: float, guess_s: float, rows: int, pays: bool) -> None:
    """10 ms a step and some for each row: with many rows, or dear guesses, a guess costs as much as it can bring."""
    speculator = taught(0.01, row_s, guess_s)
    assert bool(guesses_of(speculator, sequence([1, *COPIED, 5, *COPIED[:7]]), rows)) is pays


def test_a_request_whose_guesses_fail_gets_fewer_and_one_whose_guesses_hold_gets_more() -> None:
    speculator = taught(0.01, 0.003, 0.003)
    made, counts = sequence([1, *COPIED, 5, *COPIED[:3]]), []
    for number in range(30):
        counts.append(len(guesses_of(speculator, made)))
        made.tokens += [600 + number, *COPIED[:3]]  # never what followed before
    assert counts[0] > 0 and sum(counts[10:]) == 0
    good, counts = sequence([1, *COPIED * 3]), []
    for number in range(20):
        counts.append(len(guesses_of(speculator, good)))
        good.tokens.append(COPIED[number % 10])
    assert counts[-1] > counts[0] > 0


def test_what_a_guess_costs_is_tried_out_and_tried_again() -> None:
    speculator = Speculator(32, 512)
    asked = sequence([1, *COPIED, 5, *COPIED[:9]])
    first = guesses_of(speculator, asked)
    assert 0 < len(first) <= 4, "few, before anything is known"
    speculator = taught(0.01, 0.0005, 0.02)
    asked = sequence([1, *COPIED, 5, *COPIED[:9]])
    tries = 0
    for _ in range(400):
        found = guesses_of(speculator, asked)
        tries += bool(found)
        speculator.step_ended(step(1, len(found)), 0.0105 + 0.02 * len(found), 0)
    assert 2 <= tries <= 4, "once in a while, for machines change"


def test_good_guesses_are_not_held_back_to_try_out_what_they_cost() -> None:
    """After text without a match it is time to try again, where guesses are expected to pay anyway."""
    speculator = taught(0.01, 0.0005, 0.0005)
    asked = sequence([1, *COPIED, 5, *COPIED[:3]])
    before = len(guesses_of(speculator, asked))
    for _ in range(200):
        speculator.step_ended(step(1), 0.0105, 0)
    assert len(guesses_of(speculator, sequence([1, *COPIED, 5, *COPIED[:3]]))) == before > 0


def test_a_step_with_prompts_has_no_guesses() -> None:
    speculator = taught(0.01, 0.0005, 0.0005)
    plan = step(2)
    plan.prompts = [1]
    assert not speculator.begin_step(plan)


def test_what_a_guess_costs_with_many_sequences_is_not_told_by_steps_of_few() -> None:
    """One user's machine waits for memory, and a guess costs a tenth of a token; with 16 it costs as much as a token."""
    speculator = Speculator(32, 512)
    for _ in range(40):
        for guesses in (0, 6):
            speculator.step_ended(step(16, guesses), 0.001 + 0.0006 * (16 + guesses), 0)
    for _ in range(400):
        speculator.step_ended(step(1, 6), 0.0034 + 0.0003 * 6, 4)
    made = sequence([1, *COPIED, 5, *COPIED[:7]])
    assert guesses_of(speculator, made, rows=1)
    assert not guesses_of(speculator, made, rows=16)


@pytest.mark.parametrize("slower", [1.0, 1.2, 1.5])
def test_a_machine_that_became_slower_has_not_made_guesses_cheap(slower: float) -> None:
    """What a guess costs is known from steps long ago; the plain steps since then took longer for a reason of their own."""
    cost, rng = RelativeDraftCost(), random.Random(6)
    for speed, steps in ((1.0, 40), (slower, 100)):
        for number in range(steps):
            guesses = 2 * (number % 2) if speed == 1.0 else 0
            cost.learn(16, guesses, speed * (0.020 + 0.0010 * guesses) * rng.gauss(1, 0.02))
    assert 0.6 < cost.worth(16).least_chance < 1.1  # 0.001 s a guess, 0.00125 s a token


def test_few_guesses_are_made_until_looking_is_known_to_pay() -> None:
    """A chance that was overestimated would fill a step of many sequences with guesses that are wrong."""
    speculator = taught(0.02, 0.0001, 0.00001, rows=(1,))
    for _ in range(20):  # guesses cost nothing
        for guesses in (0, 4):
            speculator._cost_of_many(16).learn(16, guesses, 0.02)
    made = [sequence([1, *COPIED, 5, *COPIED[:7]]) for _ in range(16)]
    assert speculator.begin_step(step(16))
    found = speculator.propose_all([(each, 32) for each in made])
    assert 0 < sum(map(len, found)) <= 4


def test_a_long_prompt_that_is_taken_in_step_by_step_is_not_looked_at_in_vain() -> None:
    """With many sequences looks in vain make the next ones rarer: 16 steps would be 31, and each later look one of four."""
    rng, speculator = random.Random(5), Speculator(32, 512)
    prompt = [rng.randrange(50_000) for _ in range(16_384)]
    made = sequence(prompt, num_prompt=len(prompt))
    for number in range(16):
        made.tokens.append(prompt[number])
        assert speculator.begin_step(step(16))
        assert not speculator.propose(made, 8)
    made.tokens.append(prompt[16])
    assert speculator.begin_step(step(16))
    assert speculator.propose(made, 8)[:1] == prompt[17:18]


def test_tokens_that_a_grammar_forced_say_nothing_of_guesses() -> None:
    speculator = Speculator(32, 512)
    plan = step(16)
    plan.chunks[3] = [0] * 40
    before = speculator._cost_of_many(16).worth(16)
    for _ in range(50):
        speculator.step_ended(plan, 0.02, 0)
    assert speculator._cost_of_many(16).worth(16) == before


def test_what_one_user_has_copied_says_nothing_of_what_many_ask_for() -> None:
    speculator = taught(0.01, 0.0001, 0.00001)
    alone = sequence([1, *COPIED, 5, *COPIED[:3]])
    for number in range(200):
        guesses_of(speculator, alone)
        alone.tokens.append([*COPIED, 5][(number + 3) % 11])
    known, fresh = (own.rates for own in (alone.own_text, _looked_at(speculator, 1)))
    assert known.rate(3) > 0.35 and fresh.rate(20) > 0.9
    assert _looked_at(speculator, 16).rates.rate(20) == HitRates().rates[-1]


def _looked_at(speculator: Speculator, rows: int) -> OwnText:
    made = sequence([1, *COPIED, 5, *COPIED[:3]])
    assert speculator.begin_step(step(rows))
    speculator.propose(made, 8)
    own: OwnText = made.own_text
    return own


def test_a_long_prompt_is_taken_in_step_by_step() -> None:
    speculator = taught(0.01, 0.0005, 0.0005)
    made = sequence([*range(30, 5030), *COPIED, 5, *COPIED[:5]])
    num_steps = 0
    while not guesses_of(speculator, made):
        num_steps += 1
        assert len(made.own_text.index) <= 1024 * num_steps < 6000
    assert num_steps == 4


def test_many_sequences_whose_guesses_fail_are_looked_at_rarely() -> None:
    speculator = taught(0.001, 0.0005, 0.0001, rows=(16,))
    num_looked, rng = 0, random.Random(5)
    for _ in range(2000):
        looked = speculator.begin_step(step(16))
        num_looked += looked
        plan_s = 0.009 * rng.uniform(0.95, 1.1) + (0.0004 if looked else 0.0)
        speculator.step_ended(step(16), plan_s, 0)
    assert 0 < num_looked < 300
