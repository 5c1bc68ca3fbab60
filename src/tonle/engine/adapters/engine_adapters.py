"""`EngineAdapters`: the calls of `InferenceEngine` that concern adapters. From any thread but the front's own."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from tonle.engine.messages import AdapterInfo

if TYPE_CHECKING:
    from tonle.engine.front import Front

T = TypeVar("T")


class EngineAdapters:
    """A part of `InferenceEngine`, which has the front."""

    @property
    @abstractmethod
    def front(self) -> Front: ...

    @abstractmethod
    def on_front(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]: ...

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        """The LoRA adapters that requests may name now, by name: with digest, rank and path."""
        return dict(self.front.adapters)

    def load_adapter(self, name: str, path: str | os.PathLike[str], *, replace: bool = False) -> AdapterInfo:
        """Read the LoRA adapter in the folder `path` (as PEFT writes it); requests with `adapter=name` use it from now on.

        `replace`: also if there is one of that name, which requests under way go on with. Needs `enable_lora` or `lora`.
        """
        return self.on_front(self.front.load_adapter(name, path, replace=replace)).result()

    def unload_adapter(self, name: str) -> None:
        """New requests cannot name it any more; those under way go on to their end."""
        self.on_front(self.front.unload_adapter(name)).result()
