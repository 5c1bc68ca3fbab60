"""Endpoints that other servers of this API have and Tonle does not, so that a caller is told so rather than "not found".

Does: tell a known path from a typing error. Does not: reply.
"""

from __future__ import annotations

# A path itself, and everything below it. The names are those of OpenAI's reference and of vLLM 0.32.
UNSUPPORTED: dict[str, str] = {
    "/v1/audio": "speech and transcription",
    "/v1/images": "images",
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
