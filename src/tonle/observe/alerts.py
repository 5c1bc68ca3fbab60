"""`Alerts`: what is wrong with a server at the moment, and posts of each beginning and end to a webhook.

Does: hold one state per kind and subject, remember the latest changes, and have one task tell the webhook (`webhook.py`) of
states it does not know yet: signed, in order, at most one post per subject and minute and `MOST_PER_HOUR` in all.
Does not: find out that something is wrong (`gateway/alert_sources.py` does), or make a request wait.

States are told, not changes: if a subject fails and recovers while posts are held back, only what is true afterwards is posted,
with the number of changes that were left out. So what waits is bounded by the number of subjects. Backends come and go: for a new
one, the one that has been right for longest is forgotten.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec

from tonle.observe.webhook import Delivery, Webhook

log = logging.getLogger("tonle.alerts")

SUBJECT_PAUSE_S = 60.0  # between two posts about one subject
MOST_PER_HOUR = 30
GIVE_UP_S = 300.0  # after the first try
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
MAX_SUBJECTS = (
    1000  # more backends are not followed, while all of these fire; targets and the audit have a few subjects
)
KEPT = 20  # latest changes, for the dashboard
_HOUR_S = 3600.0

Kind = Literal["sla", "backend", "audit"]
KINDS: tuple[Kind, ...] = ("sla", "backend", "audit")
State = Literal["firing", "resolved"]


class Alert(msgspec.Struct, frozen=True):
    """A change, or what is wrong now, as the dashboard lists it."""

    time: float  # unix seconds
    kind: str
    subject: str
    state: State
    summary: str


class Alerts:
    """Use from one event loop. Without a webhook it only remembers."""

    def __init__(
        self,
        webhook: Webhook | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._webhook = webhook
        self.source = ""  # says in posts which server this is
        self._clock = clock
        self._now = now
        self._subjects: dict[tuple[str, str], _Subject] = {}
        self._latest: deque[Alert] = deque(maxlen=KEPT)
        self._posted_s: deque[float] = deque()  # moments of the posts of the last hour
        self._changed = asyncio.Event()
        self._poster: asyncio.Task[None] | None = None
        self._is_full = False  # of subjects that all fire: it was logged
        self._backoff_s = 0.0  # 0: the webhook works, as far as is known
        self._unposted = 0  # changes that no post told of, for the next one to count
        self.num_fired = dict.fromkeys(KINDS, 0)
        self.posts = {"delivered": 0, "failed": 0, "suppressed": 0}

    def fire(self, kind: Kind, subject: str, summary: str, details: dict[str, Any] | None = None) -> None:
        """Something is wrong. Nothing happens if that is known; a new summary replaces the old one."""
        self._turn(kind, subject, "firing", summary, details or {})

    def resolve(self, kind: Kind, subject: str, summary: str) -> None:
        """It is right again. Nothing happens if nothing was wrong."""
        self._turn(kind, subject, "resolved", summary, {})

    def is_firing(self, kind: Kind, subject: str) -> bool:
        known = self._subjects.get((kind, subject))
        return known is not None and known.state == "firing"

    def num_firing(self, kind: Kind) -> int:
        return sum(key[0] == kind and each.state == "firing" for key, each in self._subjects.items())

    def firing(self) -> list[Alert]:
        """What is wrong now, newest first."""
        found = [each.alert() for each in self._subjects.values() if each.state == "firing"]
        return sorted(found, key=lambda alert: alert.time, reverse=True)

    def latest(self) -> list[Alert]:
        """The last changes, newest first."""
        return list(reversed(self._latest))

    async def start(self) -> None:
        if self._webhook is not None and self._poster is None:
            self._poster = asyncio.create_task(self._post_all(self._webhook))

    async def stop(self) -> None:
        if self._poster is not None:
            self._poster.cancel()
            await asyncio.gather(self._poster, return_exceptions=True)
            self._poster = None
        if self._webhook is not None:
            self._webhook.close()

    # -- states

    def _turn(self, kind: Kind, subject: str, state: State, summary: str, details: dict[str, Any]) -> None:
        known = self._subjects.get((kind, subject))
        if known is None:
            if state == "resolved" or not self._has_room(kind):
                return
            known = self._subjects[kind, subject] = _Subject(kind, subject)
        if known.state == state:
            if state == "firing":
                known.summary, known.details = summary, details
            return
        known.state, known.summary, known.details, known.since = state, summary, details, self._now()
        if state == "firing":
            self.num_fired[kind] += 1
        self._latest.append(known.alert())
        log.log(logging.WARNING if state == "firing" else logging.INFO, "alert %s: %s", state, summary)
        if self._webhook is not None:
            known.num_untold += 1
            known.message = None
            self._changed.set()

    def _has_room(self, kind: Kind) -> bool:
        """For one more subject. Where there are too many, one that is right again is forgotten: one that the webhook need not be
        told of, if there is one, and of these the oldest."""
        if kind != "backend" or len(self._subjects) < MAX_SUBJECTS:
            return True
        now_s = self._clock()
        right = [each for each in self._subjects.values() if each.state == "resolved"]
        if not right:
            if not self._is_full:
                self._is_full = True
                log.error(
                    "alerts of %s subjects fire: what else goes wrong is not followed", f"{len(self._subjects):,}"
                )
            return False
        oldest = min(right, key=lambda each: (not each.is_over(now_s), each.since))
        self._leave_out(oldest.num_untold)
        del self._subjects[oldest.kind, oldest.name]
        self._is_full = False
        return True

    # -- posts

    async def _post_all(self, webhook: Webhook) -> None:
        while True:
            self._changed.clear()
            subject, wait_s = self._next()
            if subject is None:
                try:
                    async with asyncio.timeout(wait_s):
                        await self._changed.wait()
                except TimeoutError:
                    pass
                continue
            await self._post(webhook, subject)
            if self._backoff_s:
                await asyncio.sleep(self._backoff_s)

    def _next(self) -> tuple[_Subject | None, float | None]:
        """What to post now, or how long to wait; None: until something changes."""
        now_s = self._clock()
        while self._posted_s and self._posted_s[0] <= now_s - _HOUR_S:
            self._posted_s.popleft()
        untold = []
        for subject in self._subjects.values():
            if subject.state != subject.told:
                untold.append(subject)
            elif subject.num_untold:  # it turned and turned back
                self._leave_out(subject.num_untold)
                subject.num_untold = 0
        if not untold:
            return None, None
        if len(self._posted_s) >= MOST_PER_HOUR:
            return None, self._posted_s[0] + _HOUR_S - now_s
        due = min(untold, key=lambda subject: (subject.may_post_s, subject.since))
        return (due, None) if due.may_post_s <= now_s else (None, due.may_post_s - now_s)

    async def _post(self, webhook: Webhook, subject: _Subject) -> None:
        message = subject.message
        if message is None:
            message = subject.message = self._message(webhook.new_id(), subject)
        delivery = await webhook.post(message.id, message.body)
        now_s = self._clock()
        if delivery.delivered:
            self._note_works(webhook)
            self.posts["delivered"] += 1
            self._unposted -= message.num_earlier
            self._posted_s.append(now_s)
        else:
            self._note_failure(webhook, delivery)
            if delivery.may_retry and now_s - message.first_tried_s < GIVE_UP_S:
                return
            self.posts["failed"] += 1
            self._unposted += message.num_left_out + 1
        self.posts["suppressed"] += message.num_left_out
        subject.told = message.state
        if subject.message is message:  # else it has turned meanwhile
            subject.num_untold, subject.message = 0, None
        subject.may_post_s = now_s + SUBJECT_PAUSE_S

    def _leave_out(self, count: int) -> None:
        self._unposted += count
        self.posts["suppressed"] += count

    def _note_works(self, webhook: Webhook) -> None:
        if self._backoff_s:
            log.info("alerts are delivered to %s again", webhook.place)
        self._backoff_s = 0.0

    def _note_failure(self, webhook: Webhook, delivery: Delivery) -> None:
        """Logged once, until a post is delivered again."""
        if not self._backoff_s:
            log.error("an alert cannot be delivered to %s: %s", webhook.place, delivery.problem)
        self._backoff_s = min(max(FIRST_BACKOFF_S, 2 * self._backoff_s), MAX_BACKOFF_S)

    def _message(self, message_id: str, subject: _Subject) -> _Message:
        num_earlier, num_left_out = self._unposted, subject.num_untold - 1
        prefix = "" if subject.state == "firing" else "Resolved: "
        source = f"{self.source}: " if self.source else ""
        body = msgspec.json.encode({
            "type": f"alert.{subject.state}",
            "timestamp": _iso(self._now()),
            "text": f"{prefix}{source}{subject.summary}",
            "data": {
                "kind": subject.kind,
                "subject": subject.name,
                "state": subject.state,
                "summary": subject.summary,
                "since": _iso(subject.since),
                "source": self.source,
                "details": subject.details,
                "suppressed": num_earlier + num_left_out,
            },
        })  # fmt: skip
        return _Message(message_id, body, subject.state, num_earlier, num_left_out, self._clock())


class _Message(NamedTuple):
    """A post, the same in all tries."""

    id: str
    body: bytes
    state: State  # that it tells of
    num_earlier: int  # changes of other subjects that no post told of
    num_left_out: int  # changes of this subject that it does not tell of
    first_tried_s: float  # monotonic


class _Subject:
    """One thing that can be wrong, and what the webhook knows of it."""

    def __init__(self, kind: Kind, name: str) -> None:
        self.kind = kind
        self.name = name
        self.state: State = "resolved"
        self.summary = ""
        self.details: dict[str, Any] = {}
        self.since = 0.0  # unix seconds
        self.told: State = "resolved"
        self.num_untold = 0  # changes since it was told
        self.may_post_s = 0.0  # monotonic
        self.message: _Message | None = None  # that is being posted

    def alert(self) -> Alert:
        return Alert(self.since, self.kind, self.name, self.state, self.summary)

    def is_over(self, now_s: float) -> bool:
        """Right again, told, and past its pause: forgetting it changes no post."""
        return self.state == self.told == "resolved" and not self.num_untold and self.may_post_s <= now_s


def _iso(moment: float) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(moment))}.{int(moment % 1 * 1000):03d}Z"
