"""`khmer_sounds`: Khmer text to eSpeak NG's mnemonics of sounds, by rules of the orthography.

Does: series of consonants, vowels of both series, subscripts, finals, shifters and signs, numbers up to 9,999. Does not: know
words: spellings that are not spoken as they are written (many of Pali and Sanskrit) come out letter by letter.

A consonant belongs to the first (a) or second (o) series, which decides how its vowel sounds. A cluster is a consonant with
subscripts and a vowel; bare consonants after it are its final, or a cluster with the inherent vowel.
"""

from __future__ import annotations

import re

# Letter: sound, series.
_CONSONANTS = {
    "ក": ("k", 1), "ខ": ("kh", 1), "គ": ("k", 2), "ឃ": ("kh", 2), "ង": ("N", 2), "ច": ("c", 1), "ឆ": ("ch", 1), "ជ": ("c", 2),
    "ឈ": ("ch", 2), "ញ": ("n^", 2), "ដ": ("d", 1), "ឋ": ("th", 1), "ឌ": ("d", 2), "ឍ": ("th", 2), "ណ": ("n", 1), "ត": ("t", 1),
    "ថ": ("th", 1), "ទ": ("t", 2), "ធ": ("th", 2), "ន": ("n", 2), "ប": ("b", 1), "ផ": ("ph", 1), "ព": ("p", 2), "ភ": ("ph", 2),
    "ម": ("m", 2), "យ": ("j", 2), "រ": ("R", 2), "ល": ("l", 2), "វ": ("v", 2), "ឝ": ("s", 1), "ឞ": ("s", 1),
    "ស": ("s", 1), "ហ": ("h", 1), "ឡ": ("l", 1), "អ": ("?", 1),
}  # fmt: skip
# Sign: its sound in the first and in the second series.
_VOWELS = {
    "": ("O:", "o:"), "ា": ("a:", "i@"), "ិ": ("e", "i"), "ី": ("@I", "i:"), "ឹ": ("@", "y"), "ឺ": ("@:", "y:"), "ុ": ("o", "u"),
    "ូ": ("o:", "u:"), "ួ": ("u@", "u@"), "ើ": ("a@", "@:"), "ឿ": ("y@", "y@"), "ៀ": ("i@", "i@"), "េ": ("e:", "e:"),
    "ែ": ("aE", "E:"), "ៃ": ("aI", "eI"), "ោ": ("aO", "o:"), "ៅ": ("aU", "eU"), "ុំ": ("om", "um"), "ំ": ("Om", "um"),
    "ាំ": ("am", "o@m"), "ះ": ("ah", "e@h"), "ិះ": ("eh", "ih"), "ុះ": ("oh", "uh"), "េះ": ("eh", "eh"), "ោះ": ("Oh", "u@h"),
    "ើះ": ("@h", "@h"), "ែះ": ("Eh", "Eh"),
}  # fmt: skip
_SHORT = {"O:": "O", "o:": "u@", "a:": "a", "i@": "o@"}  # under ់
_INDEPENDENT = {
    "ឣ": "?O:", "ឤ": "?a:", "ឥ": "?e", "ឦ": "?@I", "ឧ": "?o", "ឨ": "?ok", "ឩ": "?u:", "ឪ": "?@U", "ឫ": "Ry", "ឬ": "Ry:",
    "ឭ": "ly", "ឮ": "ly:", "ឯ": "?aE", "ឰ": "?aI", "ឱ": "?aO", "ឲ": "?aO", "ឳ": "?aU",
}  # fmt: skip
# What a consonant sounds like at the end of a syllable; the others sound as they do before a vowel, without breath.
_FINALS = {
    "kh": "k",
    "ch": "c",
    "d": "t",
    "th": "t",
    "b": "p",
    "ph": "p",
    "s": "h",
    "R": "",
    "v": "w",
    "?": "",
    "h": "h",
}
_DIGITS = ("so:n", "mu@j", "pi:", "b@I", "bu@n", "pRam", "pRammu@j", "pRampi:", "pRamb@I", "pRambu@n")
_TENS = ("", "d@p", "m@pheI", "sa:ms@p", "saEs@p", "ha:s@p", "hoks@p", "c@ts@p", "paEts@p", "kaUs@p")
_UNITS = ((1000, "po@n"), (100, "Ro:j"))

_COENG, _BANTOC, _ROBAT, _TOANDAKHIAT = "\u17d2", "\u17cb", "\u17cc", "\u17cd"
_TO_FIRST, _TO_SECOND = "\u17c9", "\u17ca"  # ៉ and ៊ change the series
_REPEAT = "ៗ"
_LETTERS = "".join(_CONSONANTS)
_CLUSTER = re.compile(
    f"(?P<base>[{_LETTERS}])(?P<shift>[\u17c9\u17ca]?)(?P<under>(?:{_COENG}[{_LETTERS}])*)(?P<shift2>[\u17c9\u17ca]?)"
    f"(?P<vowel>[\u17b6-\u17c5]*[\u17c6\u17c7]?)(?P<sign>[\u17c8\u17cb-\u17d1\u17dd]*)"
)
_TOKEN = re.compile(
    f"{_CLUSTER.pattern}|(?P<alone>[\u17a3-\u17b3])|(?P<number>[០-៩0-9]+)|(?P<repeat>{_REPEAT})|(?P<pause>[\\s។៕,.!?:;]+)"
)


def khmer_sounds(text: str) -> str:
    """Letters that are not Khmer are left out. Words end where the text has spaces."""
    out: list[str] = []  # words
    open_end = False  # the last syllable can take a final consonant
    word: list[str] = []
    for found in _TOKEN.finditer(text.replace("\u200b", " ").replace("\u200c", "")):
        if found["pause"] is not None or found["number"] is not None:
            out += [*_joined(word), *([_number(found["number"])] if found["number"] else [])]
            word, open_end = [], False
        elif found["repeat"] is not None:
            word += word[-1:] or out[-1:]
        elif found["alone"] is not None:
            word.append(_INDEPENDENT[found["alone"]])
            open_end = True
        elif _TOANDAKHIAT in found["sign"]:  # a letter that is not spoken
            continue
        elif open_end and not found["under"] and not found["vowel"]:
            word[-1] = _closed(word[-1], _CONSONANTS[found["base"]][0], short=_BANTOC in found["sign"])
            open_end = False
        else:
            word.append(_syllable(found))
            open_end = not found["vowel"].endswith(("\u17c6", "\u17c7"))
    return " ".join(filter(None, [*out, *_joined(word)]))


def _joined(word: list[str]) -> list[str]:
    """The last syllable of a word is the strongest."""
    return ["".join([*word[:-1], "'", word[-1]])] if word else []


def _syllable(found: re.Match[str]) -> str:
    sound, series = _CONSONANTS[found["base"]]
    onset = ["p" if sound == "b" and found["under"] else sound]
    for letter in found["under"].replace(_COENG, ""):
        under, its_series = _CONSONANTS[letter]
        onset.append(under)
        if letter not in "ងញនមយរលវ":  # these do not change the series of the one above
            series = its_series
    shifts = found["shift"] + found["shift2"]
    if _TO_FIRST in shifts:
        series = 1
        onset = ["p" if each == "b" else each for each in onset]
    elif _TO_SECOND in shifts:
        series = 2
    sounds = _VOWELS.get(found["vowel"]) or _VOWELS.get(found["vowel"][:1], _VOWELS[""])
    vowel = sounds[series - 1]
    if _BANTOC in found["sign"]:
        vowel = _SHORT.get(vowel, vowel)
    final = "R" if _ROBAT in found["sign"] else ""
    return "".join(onset) + vowel + final


def _closed(syllable: str, consonant: str, *, short: bool) -> str:
    if short:
        for long_one, short_one in _SHORT.items():
            if syllable.endswith(long_one):
                syllable = syllable.removesuffix(long_one) + short_one
                break
    return syllable + _FINALS.get(consonant, consonant)


def _number(digits: str) -> str:
    value = int(digits[:20])
    if value >= 10_000 or digits[0] in "0០":
        return " ".join(_DIGITS[int(digit)] for digit in digits)
    words = []
    for unit, name in _UNITS:
        if value >= unit:
            words += [_DIGITS[value // unit], name]
            value %= unit
    if value >= 10:
        words.append(_TENS[value // 10])
        value %= 10
    return " ".join([*words, *([_DIGITS[value]] if value or not words else [])])
