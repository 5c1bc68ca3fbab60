"""Endpoints that other servers of this API have and Tonle does not, so that a caller is told so rather than "not found"; and
those that need a worker pool, with how to start one.

Does: tell a known path from a typing error. Does not: reply.
"""

from __future__ import annotations

from tonle.protocol.media_paths import KIND_OF, WORKERS

# A path itself, and everything below it. The names are those of OpenAI's reference and of vLLM 0.32.
UNSUPPORTED: dict[str, str] = {
    "/v1/audio": "sound other than transcriptions, translations and speech",
    "/v1/images": "images other than generations",
    "/v1/videos": "videos",
    "/v1/realtime": "realtime sessions",
    "/v1/moderations": "moderation",
    "/v1/files": "files",
    "/v1/uploads": "uploads",
    "/v1/batches": "batches",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/evals": "evaluations",
    "/v1/vector_stores": "vector stores",
    "/v1/containers": "containers",
    "/v1/conversations": "stored conversations",
    "/v1/assistants": "assistants",
    "/v1/responses/compact": "compaction of responses",
    "/v1/responses/input_tokens": "counting the tokens of a response's input",
    "/v1/threads": "threads",
    "/v1/organization": "the organization API",
    "/pooling": "pooling",
    "/classify": "classification",
    "/invocations": "SageMaker invocations",
}


def unsupported_feature(path: str) -> str | None:
    """What `path` is for, if it is an endpoint of OpenAI's or vLLM's that is not supported yet; else None."""
    for known, feature in UNSUPPORTED.items():
        if path == known or path.startswith(f"{known}/"):
            return feature
    return None


def how_to_switch_on(path: str) -> str | None:
    """For a path that a worker pool answers: how to start one. Else None."""
    if path.startswith(WORKERS):
        return "A worker of your own is started with `tonle serve --worker package.module:Class`; docs/workers.md says how."
    kind = KIND_OF.get(path)
    if kind is None:
        return None
    needs_model = kind == "images"  # the others have one of their own
    return (
        f"Start the server with `tonle serve --worker {kind}{'=MODEL' if needs_model else ''}`, or `tonle worker {kind}"
        f"{' MODEL' if needs_model else ''}` as a server of its own; "
        "docs/workers.md says more."
    )
