"""What it costs to turn tokens into text that may be shown: microseconds per token, with each setting of `hold_clusters`.

    python -m benchmarks.text_stream                      # the default model's tokenizer
    python -m benchmarks.text_stream --model FOLDER_OR_FILE

One stream per text, one token per push, as a server pushes them. Also says how long text waits: tokens whose push
returned all there was to show, of all tokens. One thread, no engine. Times are the best of several repeats, in turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tonle.engine.text import Text, load_text
from tonle.models.source import resolve

SETTINGS = ("auto", "always")
TEXTS = {
    "English": "The lake swells to five times its size when the monsoon comes, and the river that drains it turns "
    "around. People who live on the water move their houses, their schools and even their petrol stations with it. ",
    "Vietnamese": "Bác sĩ khuyên nên uống nhiều nước và nghỉ ngơi đầy đủ. Những đứa trẻ đang chơi đá bóng ở sân trường. ",
    "Khmer": "បឹងទន្លេសាបជាបឹងទឹកសាបធំជាងគេនៅអាស៊ីអាគ្នេយ៍។ ភ្លៀងធ្លាក់ខ្លាំងពេញមួយយប់ ធ្វើឱ្យផ្លូវលិចទឹក។ ",
    "Chinese": "医生建议多喝水、多休息。北京是中华人民共和国的首都，最近天气怎么样？",
}
STOPS = {"": (), ", 2 stop strings": ("\n\nUser:", "</s>")}


def seconds(text: Text, tokens: list[list[int]], hold_clusters: str, stop: tuple[str, ...]) -> float:
    stream = text.stream(stop=stop, hold_clusters=hold_clusters)
    began = time.perf_counter()
    for token in tokens:
        stream.push(token)
    stream.finish()
    return time.perf_counter() - began


def share_at_once(text: Text, tokens: list[list[int]], hold_clusters: str) -> float:
    """Of the tokens after which nothing waits."""
    stream, count = text.stream(hold_clusters=hold_clusters), 0
    for token in tokens:
        stream.push(token)
        count += stream.num_waiting == 0
    return count / len(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="whose tokenizer; the default model if not given")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--num-tokens", type=int, default=2000, help="of each text, which is repeated as need be")
    options = parser.parse_args()
    text = load_text(resolve(options.model, progress=False))
    print(f"{'':26}{'auto':>10}{'always':>10}   µs per token{'auto':>10}{'always':>8}   shown at once")
    for name, words in TEXTS.items():
        copies = 1 + options.num_tokens // len(text.encode(words))
        tokens = [[token] for token in text.encode(words * copies)[: options.num_tokens]]
        for what, stop in STOPS.items():
            best = dict.fromkeys(SETTINGS, float("inf"))
            for _ in range(options.repeats):
                for setting in SETTINGS:
                    best[setting] = min(best[setting], seconds(text, tokens, setting, stop))
            micros = "".join(f"{best[setting] / len(tokens) * 1e6:10.2f}" for setting in SETTINGS)
            shares = [share_at_once(text, tokens, setting) for setting in SETTINGS]
            print(f"{name + what:26}{micros}{shares[0]:25.0%}{shares[1]:8.0%}")


if __name__ == "__main__":
    main()
