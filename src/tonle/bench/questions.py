"""The questions of the scenarios: everyday sentences, three in English to one in Khmer, some of them asked again.

Does: draw questions from templates by a seed. Does not: send them.

A mix of n questions with a repeat share of 0.4 holds round(0.4 n) questions that were asked earlier in the same mix, at
random places; all others are new, within the mix and across the mixes of one `Questions`. The same seed gives the same
questions.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

KHMER_EVERY = 4  # of the new questions, every fourth is Khmer
MAX_QUESTIONS = 5_000  # in one mix; the templates give enough for six mixes of this size

_KHMER_DIGITS = str.maketrans("0123456789", "០១២៣៤៥៦៧៨៩")


def _numbers(first: int, last: int, step: int = 1) -> tuple[str, ...]:
    return tuple(str(number) for number in range(first, last + 1, step))


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


_NUMBERS = {
    "age": _numbers(5, 90),
    "clock": _numbers(5, 23),
    "days": _numbers(2, 21),
    "few": _numbers(2, 9),
    "grams": _numbers(150, 900, 25),
    "hours": _numbers(3, 12),
    "km": _numbers(2, 30),
    "many": _numbers(31, 99),
    "minutes": _numbers(10, 95, 5),
    "money": _numbers(20, 900, 10),
    "people": _numbers(2, 24),
    "riel": _numbers(5000, 95000, 1000),
    "young": _numbers(5, 15),
}

_ENGLISH_WORDS = {
    "activity": _words("hiking, sailing, camping, skiing, cycling, diving, climbing, fishing, surfing, riding"),
    "appliance": _words(
        "fridge, washing machine, bicycle, laptop, camera, dishwasher, heater, lawn mower, piano, sewing machine"
    ),
    "concept": _words(
        "gravity, inflation, photosynthesis, electricity, a volcano, evolution, the tides, insurance, an eclipse, "
        "a black hole, compound interest, the water cycle, friction, democracy, a vaccine, the internet"
    ),
    "dish": _words(
        "pancakes, lentil soup, fried rice, apple pie, fish curry, pumpkin soup, noodles, potato salad, bean stew, "
        "omelettes, spring rolls, dumplings, mushroom risotto, banana bread"
    ),
    "instrument": _words("the drums, the trumpet, the violin, the piano, the accordion, the guitar, the saxophone"),
    "language": _words("Khmer, Thai, French, Spanish, Swahili, Japanese, Turkish, Polish, Hindi, Vietnamese"),
    "month": _words(
        "January, February, March, April, May, June, July, August, September, October, November, December"
    ),
    "person": _words("manager, teacher, landlord, coach, colleague, customer, supervisor, neighbour"),
    "place": _words(
        "Lisbon, Phnom Penh, Kyoto, Nairobi, Oslo, Siem Reap, Montreal, Hanoi, Lima, Cairo, Seville, Krakow, Penang, "
        "Edinburgh, Istanbul, Auckland, Quito, Naples"
    ),
    "plant": _words(
        "tomato plant, mango tree, basil plant, rose bush, lemon tree, chilli plant, fern, orchid, cactus, pumpkin"
    ),
    "relative": _words("daughter, son, niece, nephew, sister, brother, aunt, uncle, mother, father, cousin"),
    "skill": _words(
        "chess, swimming, the guitar, drawing, coding, French, pottery, juggling, sewing, cooking, typing, singing"
    ),
    "topic": _words(
        "the sea, trains, the moon, old maps, bees, rivers, bridges, mountains, coffee, the rain, kites, lighthouses"
    ),
}  # fmt: skip

_ENGLISH = (
    "I have {days} days in {place}. What should I see first?",
    "How do I cook {dish} for {people} people?",
    "My {relative} is {age} and wants to learn {skill}. Where should we start?",
    "Explain {concept} to a reader aged {age} in {few} sentences.",
    "Write a short message to my {person} asking for {days} days off in {month}.",
    "What is the weather like in {place} in {month}?",
    "I can run {km} km. How should I train if I want to run {many} km?",
    "Give me {few} ideas for the birthday of my {relative}, who turns {age}.",
    "My {appliance} is {few} years old and makes a strange noise. Is a repair for {money} dollars worth it?",
    "How much water does a {plant} need in {month}?",
    "I slept for {hours} hours and still feel tired at {clock}:00. What could help?",
    'How do I say "thank you for the {dish}" in {language}?',
    "I save {money} dollars a month. What should I look for in a {appliance} a year from now?",
    "What should I pack for {days} days of {activity} in {month}?",
    "Recommend {few} books about {topic} for my {relative}, aged {age}.",
    "My train to {place} leaves at {clock}:30 and the station is {minutes} minutes away. When should I leave home?",
    "Write a poem of {few} lines about {topic} in {month}.",
    "I feel nervous before every {activity} lesson. What can I do in the last {minutes} minutes before it?",
    "A recipe needs {grams} g of flour for {few} people. How much do I need for {people}?",
    "What is {many} times {age}, and how can I work it out in my head?",
    "My neighbour plays {instrument} until {clock}:00. How do I ask for quiet in {few} friendly sentences?",
    "Plan a lesson of {minutes} minutes about {concept} for {people} students.",
    "After {hours} hours at a desk my back hurts. Which {few} stretches take less than {minutes} minutes?",
    "Is it too late to learn {skill} at {age}, with {few} hours a week?",
    "What would you ask a guide in {place} about {topic} if you had {minutes} minutes?",
)

_KHMER_WORDS = {
    "concept": _words("ទំនាញផែនដី, អតិផរណា, អគ្គិសនី, លទ្ធិប្រជាធិបតេយ្យ, វ៉ាក់សាំង, អ៊ីនធឺណិត, ភ្នំភ្លើង, សូរ្យគ្រាស, បរិស្ថាន, សេដ្ឋកិច្ច"),
    "crop": _words("ស្រូវ, ពោត, ម្ទេស, ល្ពៅ, ត្រសក់, ប៉េងប៉ោះ, ដំឡូង, សណ្ដែក, ស្វាយ, ក្រូច"),
    "dish": _words("សម្លកកូរ, អាម៉ុកត្រី, នំបញ្ចុក, សម្លម្ជូរ, បាយឆា, ឡុកឡាក់, ប្រហុកខ្ទិះ, គុយទាវ, បបរ, ត្រីអាំង"),
    "month": _words("មករា, កុម្ភៈ, មីនា, មេសា, ឧសភា, មិថុនា, កក្កដា, សីហា, កញ្ញា, តុលា, វិច្ឆិកា, ធ្នូ"),
    "person": _words("គ្រូ, នាយក, ប្រធានក្រុម, ម្ចាស់ហាង, មិត្តរួមការងារ, អ្នកគ្រប់គ្រង"),
    "place": _words("ភ្នំពេញ, សៀមរាប, បាត់ដំបង, កំពត, កែប, ក្រចេះ, មណ្ឌលគិរី, រតនគិរី, កោះកុង, ពោធិ៍សាត់, កំពង់ចាម, តាកែវ"),
    "skill": _words("ភាសាអង់គ្លេស, គូររូប, ហែលទឹក, លេងហ្គីតា, សរសេរកូដ, ចម្អិនអាហារ, ច្រៀង, កាត់ដេរ"),
    "topic": _words("សមុទ្រ, សត្វព្រៃ, ព្រះច័ន្ទ, ទន្លេសាប, ប្រវត្តិសាស្ត្រ, ព្រៃឈើ, ភ្លៀង, តន្ត្រី"),
}  # fmt: skip

_KHMER = (
    "ខ្ញុំមានពេល {days} ថ្ងៃនៅ{place}។ តើខ្ញុំគួរទៅលេងកន្លែងណាខ្លះ?",
    "តើធ្វើ{dish}សម្រាប់មនុស្ស {people} នាក់យ៉ាងដូចម្ដេច?",
    "កូនរបស់ខ្ញុំអាយុ {young} ឆ្នាំ ហើយចង់រៀន{skill}។ តើគួរចាប់ផ្ដើមពីណា?",
    "តើអាកាសធាតុនៅ{place}ក្នុងខែ{month}យ៉ាងដូចម្ដេច?",
    "សូមពន្យល់ពាក្យ «{concept}» ជា {few} ប្រយោគងាយៗ សម្រាប់សិស្ស {people} នាក់។",
    "ខ្ញុំមានលុយ {riel} រៀល។ តើខ្ញុំគួរទិញអ្វីខ្លះសម្រាប់ធ្វើ{dish}?",
    "សូមសរសេរសារខ្លីមួយជូន{person} ដើម្បីសុំឈប់សម្រាក {days} ថ្ងៃក្នុងខែ{month}។",
    "តើត្រូវដាំ{crop}នៅ{place}ក្នុងខែ{month}យ៉ាងដូចម្ដេចទើបបានផលល្អ?",
    "ខ្ញុំរត់បាន {km} គីឡូម៉ែត្រ។ តើខ្ញុំគួរហាត់យ៉ាងណា ដើម្បីរត់ឱ្យបាន {many} គីឡូម៉ែត្រ?",
    "សូមណែនាំសៀវភៅ {few} ក្បាលអំពី{topic}សម្រាប់ក្មេងអាយុ {young} ឆ្នាំ។",
)


class Questions:
    """Owns the draws from one seed. No new question comes twice."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"{seed}/questions")
        self._seen: set[str] = set()
        self._fresh = self._draw()

    def mix(self, count: int, repeat_share: float) -> list[str]:
        """`count` questions; of them `num_repeats(count, repeat_share)` were asked earlier in the list."""
        repeats = set(self._rng.sample(range(1, count), num_repeats(count, repeat_share)))
        asked: list[str] = []
        for place in range(count):
            asked.append(self._rng.choice(asked) if place in repeats else next(self._fresh))
        return asked

    def _draw(self) -> Iterator[str]:
        while True:
            khmer = len(self._seen) % KHMER_EVERY == KHMER_EVERY - 1
            question = sentence(self._rng, khmer=khmer)
            if question not in self._seen:
                self._seen.add(question)
                yield question


def num_repeats(count: int, repeat_share: float) -> int:
    """The first question cannot be a repeat."""
    return min(round(count * repeat_share), max(0, count - 1))


def sentence(rng: random.Random, *, khmer: bool = False) -> str:
    """A template, filled in."""
    return fill(rng.choice(_KHMER if khmer else _ENGLISH), rng, khmer=khmer)


def fill(template: str, rng: random.Random, *, khmer: bool = False) -> str:
    """Draw a word or a number for each `{name}` of a template."""
    words = _KHMER_WORDS if khmer else _ENGLISH_WORDS

    def draw(slot: re.Match[str]) -> str:
        name = slot[1]
        if name not in _NUMBERS:
            return rng.choice(words[name])
        return _written(rng.choice(_NUMBERS[name]), khmer=khmer)

    return re.sub(r"\{(\w+)\}", draw, template)


def _written(number: str, *, khmer: bool) -> str:
    return number.translate(_KHMER_DIGITS) if khmer else number
