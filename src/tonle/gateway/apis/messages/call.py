"""Anthropic's Messages API on top of chat completions.

    POST /v1/messages               {"model": …, "max_tokens": …, "messages": […]} → {"type": "message", "content": […], …}
    POST /v1/messages/count_tokens  {"model": …, "messages": […]} → {"input_tokens": …}

Does: connect body and reply to the pipeline. Does not: translate either (`request.py`, `reply.py`).
"""

from __future__ import annotations

import msgspec

from tonle.edge.exchange import Exchange
from tonle.gateway.apis.chat_body import CHAT, TOKENIZE
from tonle.gateway.apis.messages.reply import CountReply, MessagesReply
from tonle.gateway.apis.messages.request import CountTokensRequest, MessagesRequest, chat_body, count_body
from tonle.gateway.call import Call, Outlet, ReplyFacts
from tonle.gateway.parsed_request import DecodedBody, ParsedRequest
from tonle.protocol.parse import parse
from tonle.protocol.random_ids import random_hex


class MessagesCall(Call):
    __slots__ = ()

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange, CHAT)

    def decode(self) -> DecodedBody:
        request, warnings = parse(self.exchange.body, MessagesRequest)
        body = chat_body(request, warnings)
        self.answer_id = f"msg_{random_hex(12)}"
        return DecodedBody(body, msgspec.json.encode(body), warnings)

    def outlet(self, request: ParsedRequest | None, facts: ReplyFacts) -> Outlet:
        return MessagesReply(self.exchange, self.answer_id or "", _asked(request))


class CountTokensCall(Call):
    __slots__ = ()

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange, TOKENIZE)

    def decode(self) -> DecodedBody:
        request, warnings = parse(self.exchange.body, CountTokensRequest)
        body = count_body(request)
        return DecodedBody(body, msgspec.json.encode(body), warnings)

    def outlet(self, request: ParsedRequest | None, facts: ReplyFacts) -> Outlet:
        return CountReply(self.exchange, "", _asked(request))


def _asked(request: ParsedRequest | None) -> str:
    return "" if request is None else request.asked_model or ""
