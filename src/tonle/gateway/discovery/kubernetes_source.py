"""`KubernetesSource`: the ready pods behind a Service, followed by watching its EndpointSlices.

Does: list, then watch from there; list again when the place in the history of changes is lost (410); read a pod's role from its
label. Does not: wait for pods to be ready (Kubernetes knows), or drain them (the fleet does, when a pod is ready no longer).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TypeVar

import msgspec

from tonle.config.discovery import KubernetesDiscovery, backend_of, kubernetes_access
from tonle.config.routing import BackendConfig
from tonle.gateway.discovery.endpoint_slices import EndpointSlice, Found, Metadata, TargetRef, found_in
from tonle.gateway.discovery.kubernetes_api import GONE, Event, KubernetesApi, Refused
from tonle.gateway.discovery.source import SourceLost

log = logging.getLogger("tonle.gateway")

MIN_WATCH_S = 1.0  # a watch that ended sooner is not begun again at once
MAX_PODS_AT_ONCE = 8
DocumentT = TypeVar("DocumentT")
ROLES = {"prefill": "prefill", "decode": "decode"}  # of the label; any other value, such as both, is any
_FORBIDDEN = 403


class _SliceList(msgspec.Struct, frozen=True):
    metadata: Metadata
    items: list[EndpointSlice]


class _Pod(msgspec.Struct, frozen=True):
    metadata: Metadata


class _Status(msgspec.Struct, frozen=True):
    """Of an event of type ERROR."""

    code: int = 0
    message: str = ""


class KubernetesSource:
    def __init__(self, wanted: KubernetesDiscovery) -> None:
        """Raises `ConfigError` outside of a cluster, unless the settings say where the API server is."""
        self._wanted = wanted
        self._access = kubernetes_access(wanted)
        self.name = f"kubernetes {self._access.namespace}/{wanted.service}"
        self._core = f"/api/v1/namespaces/{self._access.namespace}"
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{self._access.namespace}/endpointslices"
        self._selector = {"labelSelector": f"kubernetes.io/service-name={wanted.service}"}
        self._roles: dict[str, str] = {}  # of pods, by key
        self._may_read_pods = True

    async def watch(self) -> AsyncIterator[Sequence[BackendConfig]]:
        api = KubernetesApi(self._access)
        try:
            while True:
                async with contextlib.aclosing(self._since_list(api)) as sets:
                    async for rows in sets:
                        yield rows
                await asyncio.sleep(MIN_WATCH_S)
        finally:
            api.close()

    async def _since_list(self, api: KubernetesApi) -> AsyncGenerator[Sequence[BackendConfig], None]:
        """One list and the changes since. Ends when these are no longer known, and it must be listed again."""
        listed = _decode(await api.get(self._path, self._selector), _SliceList)
        slices = {each.metadata.name: each for each in listed.items}
        version = listed.metadata.resource_version
        before = await self._rows(api, slices)
        yield before
        while True:
            began_s = time.monotonic()
            try:
                query = {**self._selector, "resourceVersion": version}
                async with contextlib.aclosing(api.watch(self._path, query)) as batches:
                    async for events in batches:
                        version = _apply(events, slices) or version
                        rows = await self._rows(api, slices)
                        if rows != before:
                            yield rows
                            before = rows
            except Refused as refused:
                if refused.answered != GONE:
                    raise
                log.info("%s: the watch must begin anew, with a list", self.name)
                return
            await asyncio.sleep(max(0.0, MIN_WATCH_S - (time.monotonic() - began_s)))

    async def _rows(self, api: KubernetesApi, slices: dict[str, EndpointSlice]) -> list[BackendConfig]:
        found = found_in(slices.values(), self._wanted)
        await self._read_roles(api, [each.pod for each in found if each.pod is not None])
        return [self._row(each) for each in found]

    def _row(self, found: Found) -> BackendConfig:
        fields = self._wanted.backend
        role = "any" if found.pod is None else self._roles.get(found.pod.key, "any")
        return backend_of({"role": role, **fields}, url=found.url, name=found.name)

    # -- pods

    async def _read_roles(self, api: KubernetesApi, pods: list[TargetRef]) -> None:
        """A pod that cannot be read has any role."""
        present = {pod.key for pod in pods}
        self._roles = {uid: role for uid, role in self._roles.items() if uid in present}
        if not self._may_read_pods or not self._wanted.role_label or "role" in self._wanted.backend:
            return
        turns = asyncio.Semaphore(MAX_PODS_AT_ONCE)
        unknown = [pod for pod in pods if pod.key not in self._roles]
        await asyncio.gather(*(self._read_role(api, pod, turns) for pod in unknown))

    async def _read_role(self, api: KubernetesApi, pod: TargetRef, turns: asyncio.Semaphore) -> None:
        async with turns:
            if not self._may_read_pods:
                return
            try:
                labels = _decode(await api.get(f"{self._core}/pods/{pod.name}"), _Pod).metadata.labels or {}
            except Refused as refused:
                if refused.answered == _FORBIDDEN:
                    self._may_read_pods = False
                    log.info("%s: pods cannot be read, so every backend has role any: %s", self.name, refused)
                return
            self._roles[pod.key] = ROLES.get(labels.get(self._wanted.role_label, ""), "any")


def _apply(events: list[Event], slices: dict[str, EndpointSlice]) -> str:
    """Returns where the history of changes stands now. Raises `SourceLost`; `Refused` with 410 if it is not known any more."""
    version = ""
    for event in events:
        if event.type == "ERROR":
            status = _decode(bytes(event.object), _Status)
            raise Refused(f"the watch failed: {status.message or status.code}", answered=status.code)
        each = _decode(bytes(event.object), EndpointSlice)
        version = each.metadata.resource_version
        if event.type == "DELETED":
            slices.pop(each.metadata.name, None)
        elif event.type in ("ADDED", "MODIFIED"):
            slices[each.metadata.name] = each
    return version


def _decode(document: bytes, kind: type[DocumentT]) -> DocumentT:
    try:
        return msgspec.json.decode(document, type=kind)
    except msgspec.MsgspecError as error:
        raise SourceLost(f"the API server's answer cannot be read: {error}") from None
