"""The mix of questions: its size, its repeats, its languages, its seed."""

from __future__ import annotations

import math
import re

import pytest

from tonle.bench import questions
from tonle.bench.questions import KHMER_EVERY, MAX_QUESTIONS, Questions, num_repeats


def is_khmer(text: str) -> bool:
    return bool(re.search(r"[\u1780-\u17ff]", text))


@pytest.mark.parametrize(
    ("count", "share", "repeats"), [(20, 0.4, 8), (100, 0.42, 42), (1, 0.9, 0), (3, 0.99, 2), (5, 0, 0)]
)
def test_the_share_of_repeats_is_exact(count: int, share: float, repeats: int) -> None:
    asked = Questions(1).mix(count, share)
    assert len(asked) == count
    assert count - len(set(asked)) == repeats == num_repeats(count, share)


def test_one_new_question_in_four_is_khmer() -> None:
    asked = Questions(3).mix(400, 0.0)
    assert sum(map(is_khmer, asked)) == 400 / KHMER_EVERY
    assert len(set(asked)) == 400


def test_every_slot_is_filled_and_khmer_numbers_are_khmer() -> None:
    asked = Questions(4).mix(2000, 0.0)
    assert not any(set(text) & set("{}") for text in asked)
    khmer = " ".join(filter(is_khmer, asked))
    assert not re.search(r"[0-9A-Za-z]", khmer) and re.search(r"[០-៩]", khmer)


def test_a_seed_gives_the_same_questions_and_another_seed_others() -> None:
    assert Questions(7).mix(50, 0.4) == Questions(7).mix(50, 0.4)
    assert not set(Questions(7).mix(20, 0.4)) & set(Questions(8).mix(20, 0.4))


def test_no_question_is_in_two_mixes() -> None:
    source = Questions(9)
    first, second = set(source.mix(500, 0.4)), set(source.mix(500, 0.4))
    assert not first & second


def test_the_templates_do_not_run_out() -> None:
    """Three scenarios, each with a warm-up; counted by the slots, of which two may give the same text at worst."""

    def distinct(templates: tuple[str, ...], words: dict[str, tuple[str, ...]]) -> int:
        slots = {**questions._NUMBERS, **words}
        names = [re.findall(r"\{(\w+)\}", template) for template in templates]
        return sum(math.prod(len(slots[name]) for name in each) for each in names)

    most = 6 * MAX_QUESTIONS
    assert distinct(questions._KHMER, questions._KHMER_WORDS) > most / KHMER_EVERY
    assert distinct(questions._ENGLISH, questions._ENGLISH_WORDS) > most
