"""Paths of other servers are recognized; a typing error is not."""

from __future__ import annotations

import pytest

from tonle.gateway.apis.translated import TRANSLATED
from tonle.gateway.routes import PIPED
from tonle.protocol.unsupported_paths import UNSUPPORTED, unsupported_feature


@pytest.mark.parametrize(
    ("path", "feature"),
    [
        ("/v1/audio/voices", "sound other than transcriptions, translations and speech"),
        ("/v1/files", "files"),
        ("/v1/files/file-1/content", "files"),
        ("/v1/fine_tuning/jobs", "fine-tuning"),
        ("/v1/filesystem", None),
        ("/v1/chat/completion", None),
        ("/", None),
    ],
)
def test_known_paths(path: str, feature: str | None) -> None:
    assert unsupported_feature(path) == feature


def test_what_is_served_is_not_called_unsupported() -> None:
    assert not [
        path for path in (*PIPED, *TRANSLATED, "/v1/models", "/metrics", "/admin/keys") if unsupported_feature(path)
    ]
    assert all(path.startswith("/") and not path.endswith("/") for path in UNSUPPORTED)
