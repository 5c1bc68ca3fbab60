"""How well scores and embeddings of a model find the one document of five that answers a query: a small set of our own.

Does: rank by each method, print how often the right document comes first. Does not: replace a test of your own: twelve queries
tell a method that works from one that does not, and no more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from tonle import GenerationConfig, InferenceEngine
from tonle.replica.scoring import Told, told_likelihood, told_yes_no

Rank = Callable[[str, list[str]], list[float]]  # scores of documents, larger is better

# A query, and documents of which the first one answers it.
QUERIES: list[tuple[str, list[str]]] = [
    (
        "what is the capital of france",
        [
            "Paris is the capital and largest city of France, on the river Seine.",
            "Berlin is the capital of Germany and its largest city.",
            "The Eiffel Tower was built in 1889 for a world fair.",
            "France borders Spain, Italy, Switzerland and Germany.",
            "A capital letter begins every sentence in English.",
        ],
    ),
    (
        "how do plants make food",
        [
            "Photosynthesis lets plants turn sunlight, water and carbon dioxide into sugar.",
            "Plants in the living room should be watered once a week.",
            "A food plant processes tomatoes into sauce and packs it in cans.",
            "Animals eat plants or other animals to get energy.",
            "The power plant makes electricity from coal.",
        ],
    ),
    (
        "symptoms of dehydration",
        [
            "Thirst, dark urine, dizziness and a dry mouth are signs that the body lacks water.",
            "Drinking water is cleaned in several steps before it reaches homes.",
            "Symptoms of a cold are a runny nose and a sore throat.",
            "The desert is dry and hot during the day.",
            "Dried fruit keeps longer because most of its water was removed.",
        ],
    ),
    (
        "how to fix a flat bicycle tire",
        [
            "Remove the wheel, take out the inner tube, find the hole and glue a patch over it, then pump it up again.",
            "Bicycles are a popular means of transport in the Netherlands.",
            "Car tires should be changed every six years.",
            "The race was won by a cyclist from Colombia.",
            "A flat in the city center costs more rent than one outside.",
        ],
    ),
    (
        "when did the second world war end",
        [
            "The war in Europe was over in May 1945, and in the Pacific with Japan's surrender in September 1945.",
            "The First World War began in 1914 after the murder of an archduke.",
            "World trade has grown since the year 2000.",
            "The movie about the war was filmed in 1998.",
            "The Cold War was a long conflict between two blocs.",
        ],
    ),
    (
        "best way to cook rice",
        [
            "Rinse the rice, add one and a half cups of water for each cup, bring it to a boil and simmer for 15 minutes.",
            "Rice is grown in flooded fields in Asia.",
            "Cooking pasta needs a large pot of salted water.",
            "The price of rice rose last year.",
            "The chef opened a restaurant in Phnom Penh.",
        ],
    ),
    (
        "python read a file line by line",
        [
            "Use `with open(path) as f:` and loop `for line in f:` to get each line of a text file.",
            "Pythons are large snakes that live in Africa and Asia.",
            "Use os.remove(path) to delete a file in Python.",
            "Java programs read input with a Scanner.",
            "Files of the court are open to the public.",
        ],
    ),
    (
        "largest planet in the solar system",
        [
            "Jupiter has more mass than all other planets that orbit the Sun together.",
            "Mercury is the smallest planet and is closest to the Sun.",
            "Solar panels turn light into electricity.",
            "The Moon orbits the Earth in about 27 days.",
            "The largest ocean on Earth is the Pacific.",
        ],
    ),
    (
        "who wrote romeo and juliet",
        [
            "The tragedy of two young lovers in Verona is a play by William Shakespeare.",
            "Verona is a city in the north of Italy.",
            "Charles Dickens wrote novels about life in London.",
            "Juliet is a popular given name.",
            "The opera was composed by Giuseppe Verdi.",
        ],
    ),
    (
        "angkor wat history",
        [
            "The temple complex in Cambodia was built in the 12th century by King Suryavarman II for the god Vishnu.",
            "Cambodia's largest lake is the Tonle Sap.",
            "The history of the Roman empire spans a thousand years.",
            "Bangkok has many temples that tourists visit.",
            "The king gave a speech on the national holiday.",
        ],
    ),
    (
        "reduce electricity bill at home",
        [
            "Switching to LED lamps, better insulation and turning devices off instead of standby save power and money.",
            "The bill passed parliament with a large majority.",
            "Electricity was studied by Benjamin Franklin.",
            "Homes in this street were built in 1950.",
            "Electric cars need charging stations.",
        ],
    ),
    (
        "vaccination side effects in children",
        [
            "After a shot, kids may have a sore arm, a mild fever or feel tired for a day or two.",
            "Children should sleep nine hours or more each night.",
            "Side roads in the village are being repaired.",
            "The effects in the film were made with computers.",
            "Vaccines are stored in a refrigerator.",
        ],
    ),
]


def logprobs(engine: InferenceEngine, asked: list[Told]) -> list[list[float]]:
    ids = []
    for told in asked:
        config = GenerationConfig(max_length=1, do_sample=False, prompt_logprobs=0, prompt_logprobs_start=told.start)
        ids.append(engine.submit_request(told.prompt, config))
    found = []
    for request_id, told in zip(ids, asked, strict=True):
        records = engine.result(request_id).prompt_logprobs or []
        found.append([record.logprob for record in records[told.start :] if record is not None])
    return found


def methods(engine: InferenceEngine) -> dict[str, Rank]:
    text = engine.tokenizer

    def likelihood(query: str, documents: list[str]) -> list[float]:
        found = logprobs(engine, [told for each in documents for told in told_likelihood(query, each, text)])
        return [math.exp(sum(each) / len(each)) for each in found]

    def yes_no(query: str, documents: list[str]) -> list[float]:
        found = logprobs(engine, [told for each in documents for told in told_yes_no(query, each, text)])
        return [sum(yes) - sum(no) for yes, no in zip(found[::2], found[1::2], strict=True)]

    def cosine(pooling: str) -> Rank:
        def rank(query: str, documents: list[str]) -> list[float]:
            vectors = engine.embed([query, *documents], pooling)
            return [float(value) for value in vectors[1:] @ vectors[0]]

        return rank

    return {
        "score, likelihood": likelihood,
        "score, yes_no": yes_no,
        "embeddings, last": cosine("last"),
        "embeddings, mean": cosine("mean"),
    }


def print_ranking(engine: InferenceEngine, console: Console) -> None:
    table = Table(
        title=f"{len(QUERIES)} queries, one of {len(QUERIES[0][1])} documents answers each", title_justify="left"
    )
    for name in ("", "first", "mean reciprocal rank", "seconds"):
        table.add_column(name, justify="left" if not name else "right")
    for name, rank in methods(engine).items():
        began, places = time.monotonic(), []
        for query, documents in QUERIES:
            scores = rank(query, documents)
            places.append(1 + sum(score > scores[0] for score in scores))
        mean = sum(1 / place for place in places) / len(places)
        table.add_row(name, f"{places.count(1)} of {len(places)}", f"{mean:.2f}", f"{time.monotonic() - began:.1f}")
    console.print(table)
