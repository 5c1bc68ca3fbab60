"""`PocketSphinx`: English with the model that comes in the package's wheel: small, on one core, no download.

Does: cut the sound into utterances where nobody speaks, recognize each with times and probabilities of words. Does not:
detect languages, translate, or write punctuation and capital letters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from tonle.errors import InvalidRequest, ModelError
from tonle.workers.kinds.read_audio import SAMPLE_RATE, Pcm
from tonle.workers.transcript import AsrOrder, Segment, Word

MAX_UTTERANCE_S = 30.0  # one that goes on is cut: what the decoder holds grows with it
MAX_VOCABULARY = 1000  # words
_FRAMES_PER_S = 100  # of the decoder
_WORD = re.compile(r"[a-z][a-z'.-]{0,40}")
_VARIANT = re.compile(r"\(\d+\)$")  # of a pronunciation: two(2)
_OWN = "tonle_vocabulary"
_SERVE_WHISPER = "serve a folder with a Whisper model (faster-whisper) for that"


class PocketSphinx:
    def __init__(self) -> None:
        try:
            import pocketsphinx
        except ImportError:
            raise ModelError(
                "asr without a model needs PocketSphinx: pip install 'tonle[speech]'; "
                "or give a folder with a Whisper model for faster-whisper"
            ) from None
        self._new_endpointer: Callable[[], Any] = lambda: pocketsphinx.Endpointer(sample_rate=SAMPLE_RATE)
        self._decoder: Any = pocketsphinx.Decoder(samprate=SAMPLE_RATE, loglevel="FATAL")
        self._plain = self._decoder.current_search()
        self.facts: dict[str, Any] = {"recognizer": "pocketsphinx", "languages": ["en"], "translates": False}

    def begin(self, order: AsrOrder, pcm: Pcm) -> tuple[str | None, dict[str, str]]:
        if order.translate:
            raise InvalidRequest(
                f"this model cannot translate: PocketSphinx hears English; {_SERVE_WHISPER}", param="model"
            )
        if order.language is not None and order.language.lower().partition("-")[0] not in ("en", "english"):
            raise InvalidRequest(f"this model hears English only; {_SERVE_WHISPER}", param="language")
        warnings = {}
        if order.prompt:
            warnings["prompt"] = "has no effect on PocketSphinx; vocabulary says which words to expect"
        if order.temperature:
            warnings["temperature"] = "has no effect on PocketSphinx"
        self._decoder.reinit_feat()  # else it goes on with what it learned of the last caller's voice
        self._listen_for(order.vocabulary)
        return "en", warnings

    def _listen_for(self, vocabulary: list[str] | None) -> None:
        """These words alone, in any order; None: all that the model knows."""
        decoder = self._decoder
        if decoder.current_search() != self._plain:
            decoder.activate_search(self._plain)
            decoder.remove_search(_OWN)
        if vocabulary is None:
            return
        words = list(dict.fromkeys(word.lower() for word in vocabulary))
        if not 1 <= len(words) <= MAX_VOCABULARY:
            raise InvalidRequest(f"vocabulary must have 1 to {MAX_VOCABULARY} words", param="vocabulary")
        for word in words:
            if _WORD.fullmatch(word) is None or decoder.lookup_word(word) is None:
                raise InvalidRequest(
                    f"vocabulary: the dictionary of this model does not have the word {word[:40]!r}", param="vocabulary"
                )
        grammar = f"#JSGF V1.0; grammar {_OWN}; public <{_OWN}> = ( {' | '.join(words)} )+ ;"
        decoder.add_jsgf_string(_OWN, grammar)
        decoder.activate_search(_OWN)

    def segments(self, order: AsrOrder, pcm: Pcm) -> Iterator[Segment]:
        decoder = self._decoder
        for start_s, frames in self._utterances(pcm):
            decoder.start_utt()
            num_bytes = 0
            try:
                for frame in frames:
                    decoder.process_raw(frame, no_search=False, full_utt=False)
                    num_bytes += len(frame)
            finally:
                decoder.end_utt()
            if segment := self._segment(start_s, num_bytes / 2 / SAMPLE_RATE, words_wanted=order.words):
                yield segment

    def _utterances(self, pcm: Pcm) -> Iterator[tuple[float, Iterator[bytes]]]:
        """When each begins, in seconds, and its sound. The sound of one must be read before the next is asked for."""
        endpointer: Any = self._new_endpointer()
        size = endpointer.frame_bytes // 2  # samples
        at = 0

        def heard() -> bytes:
            """Of the next frame, if somebody speaks."""
            nonlocal at
            frame = pcm[at : at + size].tobytes()
            at += size
            found = endpointer.process(frame) if len(frame) == 2 * size else endpointer.end_stream(frame)
            return found or b""

        def rest(first: bytes) -> Iterator[bytes]:
            num_bytes, frame = 0, first
            while True:
                if frame:
                    yield frame
                    num_bytes += len(frame)
                if not endpointer.in_speech or at >= len(pcm) or num_bytes >= MAX_UTTERANCE_S * SAMPLE_RATE * 2:
                    return
                frame = heard()

        cut = False  # the last utterance was: the next goes on where it ended
        while at < len(pcm):
            before_s = at / SAMPLE_RATE
            if first := heard():
                yield before_s if cut else endpointer.speech_start, rest(first)
            cut = endpointer.in_speech

    def _segment(self, start_s: float, seconds: float, *, words_wanted: bool) -> Segment | None:
        """What was found in the last utterance; None if no words were."""
        decoder = self._decoder
        if decoder.hyp() is None:
            return None
        words = [
            Word(
                word=_VARIANT.sub("", found.word),
                start=round(start_s + found.start_frame / _FRAMES_PER_S, 2),
                end=round(start_s + (found.end_frame + 1) / _FRAMES_PER_S, 2),
                probability=round(min(1.0, max(0.0, found.prob)), 4),
            )
            for found in decoder.seg()
            if found.word[0] not in "<[+("  # silence and noise
        ]
        if not words:
            return None
        sure = [max(word.probability or 0.0, 1e-9) for word in words]
        return Segment(
            start=words[0].start,
            end=min(words[-1].end, round(start_s + seconds, 2)),
            text="".join(f" {word.word}" for word in words),  # as Whisper has it: texts can be joined as they are
            words=words if words_wanted else [],
            avg_logprob=round(sum(map(math.log, sure)) / len(sure), 4),
        )
