"""What a page in a browser sends, for tests."""

from __future__ import annotations

import httpx

from tests.gateway.running_gateway import ADMIN, RunningGateway

API = "/dashboard/api"
SAME = {"sec-fetch-site": "same-origin"}  # of each request that a page of the server makes
OWN = SAME | {"x-tonle-dashboard": "1"}  # and what the dashboard's scripts add


async def log_in(place: RunningGateway, key: str = ADMIN, **headers: str) -> httpx.Response:
    reply = await place.client.post(f"{API}/login", json={"key": key}, headers=OWN | headers)
    place.client.cookies.clear()  # tests say themselves which cookie they send
    return reply


async def session(place: RunningGateway, key: str = ADMIN) -> dict[str, str]:
    """The header of a browser that has logged in."""
    reply = await log_in(place, key)
    assert reply.status_code == 204, reply.text
    return {"cookie": reply.headers["set-cookie"].partition(";")[0]}


async def make_key(place: RunningGateway, *scopes: str) -> dict[str, str]:
    reply = await place.post("/admin/keys", {"name": "+".join(scopes), "scopes": list(scopes)})
    found: dict[str, str] = reply.json()
    return found
