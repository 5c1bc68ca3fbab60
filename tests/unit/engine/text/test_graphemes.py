"""Cluster boundaries, example by example, then against the second opinion on the whole corpus."""

from __future__ import annotations

import pytest

from tests.unit.engine.text.corpus import CORPUS
from tests.unit.engine.text.letters import cuts_letter
from tonle.engine.text.graphemes import MAX_CLUSTER, clusters, floor, is_boundary, safe_length, trim

LETTERS = {
    "khmer": "ខ្ញុំ|ស្រ|លា|ញ់|ភា|សា|ខ្មែ|រ",
    "khmer, two subscripts": "ស្ត្រី",
    "khmer, subscript independent vowel": "ក្ឫ",
    "khmer, robat": "ធ|ម៌",
    "khmer, shifter before subscript": "ប៊្យ",
    "khmer, coeng with joiners": "ក្\u200dក|ក្\u200cក",
    "hindi": "हि|न्दी| |क्ष|त्रि|य",
    "hindi, visible virama asked for": "क्\u200c|ष",
    "hindi, half form asked for": "क्\u200dष",
    "hindi, reph on a vowel": "नि|र्ऋ|ति",
    "hindi, word-final virama": "अ|र्था|त्| |य|ह",
    "bengali": "ক্ষ|অ্যা|প",
    "gurmukhi": "ਪ੍ਰ",
    "gujarati": "ક્ષે|ત્ર",
    "oriya": "କ୍ଷେ|ତ୍ର",
    "telugu": "స్త్రీ",
    "kannada": "ಕ್ಷೇ|ತ್ರ",
    "malayalam": "സ്ത്രീ|ആ|ണ്",
    "tamil": "அ|க்|கா|ஸ்ரீ|ல|க்ஷ்|மி",
    "sinhala": "ශ්\u200dරී|අ|ක්|ක",
    "myanmar": "မြ|န်|မာ|စာ",
    "myanmar, kinzi": "အ|င်္ဂ|လိ|ပ်",
    "tai tham": "ᩈ᩠ᨿᩣ᩠ᨾ",
    "balinese": "ᬓ᭄ᬓ",
    "javanese": "ꦏ꧀ꦱ",
    "tibetan": "བོ|ད|་|སྐ|ད",
    "thai": "กำ|ลั|ง|ที่|เ|ก่|า",
    "lao": "ນ້ຳ",
    "korean": "한|국",
    "korean, jamo": "\u1112\u1161\u11ab|\u1100\u116e\u11a8",
    "arabic": "كُ|لُّ",
    "vietnamese, decomposed": "e\u0302\u0323|n",
    "japanese, half width": "ﾊﾟ|ｿ",
    "ideographic variation": "葛󠄀|城",
    "families": "👨‍👩‍👧‍👦|👩🏽‍💻",
    "flags": "🇰🇭|🇫🇷|🇰",
    "regional flag": "🏴󠁧󠁢󠁥󠁮󠁧󠁿|a",
    "skin tones": "👍🏽|👍",
    "keycaps": "1️⃣|#️⃣|1",
    "number sign holds on": "\u06001|2",
    "line ends": "a|\r\n|\n|\r|b",
    "a mark after a line end stands alone": "\n|\u0301|a",
    "zero width space": "ក|\u200b|ខ",
}


@pytest.mark.parametrize("parted", LETTERS.values(), ids=LETTERS.keys())
def test_clusters(parted: str) -> None:
    expected = parted.split("|")
    text = "".join(expected)
    assert clusters(text) == expected
    ends = {sum(map(len, expected[:count])) for count in range(len(expected) + 1)}
    assert {index for index in range(len(text) + 1) if is_boundary(text, index)} == ends


@pytest.mark.parametrize("script", CORPUS)
def test_no_cluster_ends_inside_a_letter(script: str) -> None:
    for text in CORPUS[script]:
        place = 0
        for cluster in clusters(text):
            place += len(cluster)
            assert not cuts_letter(text, place), (text[:place], text[place:])
        assert place == len(text)


@pytest.mark.parametrize("script", CORPUS)
def test_what_is_safe_stays_safe_as_the_text_grows(script: str) -> None:
    for text in CORPUS[script]:
        for length in range(len(text) + 1):
            safe = safe_length(text[:length])
            assert is_boundary(text, safe)
            assert not cuts_letter(text, safe)
            assert len(clusters(text[safe:length])) <= 1  # never more than one letter waits


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("", 0),
        ("a", 0),
        ("hello", 4),
        ("hello\n", 6),  # a line end takes no marks
        ("hello\r", 5),  # unless it becomes CR LF
        ("hello\r\n", 7),
        ("a\t", 2),
        ("\x7f", 1),
        ("\u0600a", 0),
        ("ក\u200b", 2),
        ("ក្", 0),
        ("កខ", 1),
        ("🇰🇭", 0),
        ("🇰🇭🇫", 2),
    ],
)
def test_safe_length(text: str, safe: int) -> None:
    assert safe_length(text) == safe


def test_an_endless_mark_is_not_held_forever() -> None:
    assert safe_length("a" + "\u0301" * (MAX_CLUSTER - 1)) == 0
    assert safe_length("a" + "\u0301" * MAX_CLUSTER) == MAX_CLUSTER + 1


def test_floor() -> None:
    text = "aក្ខb"
    assert [floor(text, index) for index in range(len(text) + 1)] == [0, 1, 1, 1, 4, 5]


@pytest.mark.parametrize(
    ("text", "trimmed"),
    [
        ("ក្", "ក"),
        ("ស្ត្", "ស្ត"),
        ("ក្\u200d", "ក"),
        ("မင်္", "မင်"),
        ("👨‍👩‍", "👨‍👩"),
        ("👩🏽‍", "👩🏽"),
        ("ह\u0939\u094d", "ह\u0939\u094d"),  # a virama is visible and ends many words
        ("நான்", "நான்"),
        ("ه\u200d", "ه\u200d"),  # an Arabic letter in its joining form
        ("ខ្មែរ", "ខ្មែរ"),
        ("🇰", "🇰"),
        ("plain", "plain"),
        ("", ""),
    ],
)
def test_trim(text: str, trimmed: str) -> None:
    assert trim(text) == trimmed
