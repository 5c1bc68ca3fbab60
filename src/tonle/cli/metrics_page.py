"""`MetricsPage`: the /metrics of a server, read again and again, and `Reading`, what one time brought.

Does: fetch, parse, say what is wrong in the words of the command line. Does not: know what numbers mean (`top_figures.py`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import NamedTuple

from tonle.cli.remote_server import RemoteServer
from tonle.edge.buffered_reply import BufferedReply
from tonle.edge.streamed_reply import StreamedReply
from tonle.errors import CallerError

PATH = "/metrics"
_TIMEOUT_S = 5.0
_KNOWN = ("vllm:", "tonle:")  # names begin so


class Sample(NamedTuple):
    labels: dict[str, str]
    value: float


class Reading:
    """All samples of one time, by name."""

    def __init__(self, at_s: float, samples: dict[str, list[Sample]]) -> None:
        """`at_s` is monotonic."""
        self.at_s = at_s
        self._samples = samples

    def samples(self, name: str, **labels: str) -> list[Sample]:
        """Those with these labels."""
        found = self._samples.get(name, [])
        return [each for each in found if all(each.labels.get(key) == value for key, value in labels.items())]

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over all other labels. None: there is no such sample."""
        found = self.samples(name, **labels)
        return sum(each.value for each in found) if found else None

    def values(self, name: str, label: str) -> dict[str, float]:
        """By the value of one label, summed over the others."""
        found: defaultdict[str, float] = defaultdict(float)
        for each in self.samples(name):
            found[each.labels.get(label, "")] += each.value
        return dict(found)

    def has(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._samples)


def parse(text: str, at_s: float) -> Reading:
    """Raises `ValueError` if it is no such page."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            samples[each.name].append(Sample(each.labels, each.value))
    return Reading(at_s, dict(samples))


class MetricsPage(RemoteServer):
    """Use from one event loop."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """`url` of the server, with or without http://, /v1 and /metrics."""
        super().__init__(url.rstrip("/").removesuffix(PATH), api_key=api_key)

    async def read(self) -> Reading:
        """Raises `TonleError`."""
        reply = await self.get(PATH, timeout_s=_TIMEOUT_S)
        if reply.status != 200:
            raise self.refusal(reply, reply.body)
        try:
            reading = parse(reply.body.decode(), time.monotonic())
        except (ValueError, IndexError, KeyError):  # the parser raises all of them for what is not in its format
            raise self.not_openai("what it sends is not in Prometheus' text format") from None
        if not any(map(reading.has, _KNOWN)):
            raise self.not_openai("it has metrics, but none with a name of vLLM's or Tonle's")
        return reading

    def refusal(self, reply: BufferedReply | StreamedReply, body: bytes) -> CallerError:
        if 300 <= reply.status < 400 and "location" in reply.headers:
            return CallerError(f"{self.address}{PATH} redirects to {reply.headers['location']}; give that address.")
        if reply.status == 403:
            return CallerError(
                f"{self.address}: this API key may not read metrics; it needs the scope metrics or admin."
            )
        if reply.status in (404, 405):
            return self.not_openai(f"{PATH} answers {reply.status}")
        return super().refusal(reply, body)

    def not_openai(self, detail: str) -> CallerError:
        return CallerError(f"{self.address} has no metrics of a language model server: {detail}.")
