"""Bodies of /v1/embeddings, /v1/score and /v1/rerank, and what a record keeps of vectors.

Does: name every field we act on, with OpenAI's names, vLLM's, Jina's and Cohere's. Does not: check values against a model
(`replica/`).
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from tonle.protocol.field_types import Integer, about
from tonle.protocol.fields import OtherFields, Refusal
from tonle.protocol.openai import FieldWarning, Message, PromptTokensDetails

# The same endpoint under the names that vLLM, Jina and Cohere have for it.
SCORE_PATHS = ("/v1/score", "/score")
RERANK_PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")

Method = Literal["likelihood", "yes_no"]

# -- requests

_PADDING = {"padding": "has no effect: inputs are not padded"}
_INSTRUCTION = Refusal("put the instruction that the model was trained with before the text")


class PoolingFields(Struct, kw_only=True):
    """What all of them share."""

    model: Annotated[str | None, about("Name of the model or of an adapter; may be left out.")] = None
    priority: Annotated[
        int | str | None, about("critical, high, normal or low; or 0 (first) to 3. Default normal.")
    ] = None


class EmbeddingRequest(PoolingFields, kw_only=True):
    other_fields: ClassVar = OtherFields(
        refused={
            "continue_final_message": Refusal("a conversation is embedded as it is", (False,)),
            **dict.fromkeys(("input_type", "instruction", "task"), _INSTRUCTION),
            "embedding_types": Refusal("use encoding_format", (["float"],)),
        },
        no_effect=_PADDING,
    )
    input: Annotated[
        str | list[str | Integer | list[Integer]] | None,
        about("Text, token ids, or a list of up to 2048 of either: one embedding for each."),
    ] = None
    messages: Annotated[
        list[Message] | None, about("In place of input: a conversation, rendered with the chat template.")
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, about("base64: float32, little-endian. Default float.")
    ] = None
    dimensions: Annotated[Integer | None, about("Accepted if equal to the model's own.")] = None
    # Not OpenAI's.
    pooling: Annotated[
        Literal["last", "mean"] | None, about("The last token's hidden state (default), or the mean of all tokens'.")
    ] = None
    normalize: Annotated[bool | None, about("Scale to length 1. Default true.")] = None
    use_activation: Annotated[bool | None, about("vLLM's name for normalize.")] = None
    truncate_prompt_tokens: Annotated[
        Integer | None, about("Use this many tokens of a longer input; -1: as many as the model takes.")
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None, about("Where a longer input is cut off. Default right: its beginning is used.")
    ] = None
    add_special_tokens: Annotated[bool | None, about("Let the tokenizer add its begin token. Default true.")] = None
    add_generation_prompt: Annotated[bool | None, about("With messages only. Default false.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("Variables for the chat template.")] = None
    embed_dtype: Annotated[Literal["float32"] | None, about("Of base64. Only float32.")] = None
    endianness: Annotated[Literal["native", "little"] | None, about("Of base64. Always little.")] = None


class EncoderRequest(Struct, kw_only=True):
    """/v1/embeddings of a pool of encoders: `EmbeddingRequest` without what is a decoder's, with prompts."""

    other_fields: ClassVar = OtherFields(
        refused={
            **dict.fromkeys(
                (
                    "messages",
                    "add_generation_prompt",
                    "chat_template",
                    "chat_template_kwargs",
                    "continue_final_message",
                ),
                Refusal("encoders have no chat template; send the text as input", (False, {})),
            ),
            "pooling": Refusal("an encoder is pooled as it was trained; the pool's options can name another pooling"),
            **dict.fromkeys(
                ("instruction", "task"), Refusal("use prompt_name or input_type, or put it before the text")
            ),
            "embedding_types": Refusal("use encoding_format", (["float"],)),
        },
        no_effect={**_PADDING, "priority": "has no effect: a pool of workers takes jobs as they come"},
    )
    model: Annotated[str | None, about("Name of the pool's model; may be left out.")] = None
    input: Annotated[
        str | list[str | Integer | list[Integer]] | None,
        about("Text, token ids, or a list of up to 2048 of either: one embedding for each."),
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, about("base64: float32, little-endian. Default float.")
    ] = None
    dimensions: Annotated[
        Integer | None, about("Accepted if equal to the model's own, or if it was trained for shorter ones.")
    ] = None
    input_type: Annotated[
        str | None, about("query or document: the model's own prompt for it is put before each text.")
    ] = None
    prompt_name: Annotated[str | None, about("One of the model's prompts by its name.")] = None
    normalize: Annotated[bool | None, about("Scale to length 1. Default true.")] = None
    use_activation: Annotated[bool | None, about("vLLM's name for normalize.")] = None
    truncate_prompt_tokens: Annotated[
        Integer | None, about("Use this many tokens of a longer input; -1: as many as the model takes.")
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None, about("Where a longer input is cut off. Default right: its beginning is used.")
    ] = None
    add_special_tokens: Annotated[bool | None, about("Let the tokenizer add its own. Default true.")] = None
    embed_dtype: Annotated[Literal["float32"] | None, about("Of base64. Only float32.")] = None
    endianness: Annotated[Literal["native", "little"] | None, about("Of base64. Always little.")] = None


class ScoringFields(PoolingFields, kw_only=True):
    """What scores and rankings share."""

    other_fields: ClassVar = OtherFields(
        refused={
            "instruction": Refusal("put it into the query"),
            "max_tokens_per_query": Refusal("queries are used whole"),
            "truncate_prompt_tokens": Refusal("use max_tokens_per_doc"),
            "truncation_side": Refusal("max_tokens_per_doc keeps the beginning of a document", ("right",)),
            "use_activation": Refusal("scores are always 0 to 1", (True,)),
            "add_special_tokens": Refusal("the server writes the prompts", (True,)),
            "chat_template_kwargs": Refusal("scores do not use the chat template", ({},)),
            "chat_template": Refusal("scores do not use the chat template"),
            **dict.fromkeys(("apply_softmax", "item_first", "label_token_ids"), Refusal("use method: yes_no")),
        },
        no_effect=_PADDING,
    )

    method: Annotated[
        Method | None,
        about("likelihood: of the query, given the document (default). yes_no: the model is asked whether it fits."),
    ] = None
    max_tokens_per_doc: Annotated[Integer | None, about("Use this many tokens of a longer document.")] = None


class Document(Struct, kw_only=True):
    text: str


class ScoreRequest(ScoringFields, kw_only=True):
    other_fields: ClassVar = ScoringFields.other_fields._replace(
        refused={
            **ScoringFields.other_fields.refused,
            **dict.fromkeys(("data_1", "query"), Refusal("use text_1")),
            **dict.fromkeys(("data_2", "items"), Refusal("use text_2")),
        }
    )
    text_1: Annotated[str | list[str] | None, about("The query, or one for each document. Also named queries.")] = None
    text_2: Annotated[str | list[str] | None, about("The document or documents. Also named documents.")] = None
    queries: Annotated[str | list[str] | None, about("Another name for text_1.")] = None
    documents: Annotated[str | list[str] | None, about("Another name for text_2.")] = None


class RerankRequest(ScoringFields, kw_only=True):
    query: Annotated[str, about("What the documents are compared with.")]
    documents: Annotated[list[str | Document], about('Texts, or objects {"text": ...}.')]
    top_n: Annotated[Integer | None, about("Return only so many, the best. Default all.")] = None
    return_documents: Annotated[bool | None, about("Repeat each document in its result. Default true.")] = None


# -- replies


class PoolingUsage(Struct):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingData(Struct):
    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[EmbeddingData]
    usage: PoolingUsage
    warnings: list[FieldWarning] | UnsetType = UNSET


class EncodedEmbeddings(EmbeddingList, kw_only=True):
    """The same with data that is JSON already."""

    data: list[msgspec.Raw]  # type: ignore[assignment]


class ScoreData(Struct):
    index: int
    score: Annotated[float, about("0 to 1, larger is better; comparable within one request and method.")]
    object: Literal["score"] = "score"


class ScoreList(Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreData]
    usage: PoolingUsage
    warnings: list[FieldWarning] | UnsetType = UNSET


class RankedDocument(Struct):
    index: Annotated[int, about("Place among the documents of the request.")]
    relevance_score: Annotated[float, about("0 to 1, larger is better; comparable within one request and method.")]
    document: Document | UnsetType = UNSET


class Ranking(Struct, kw_only=True):
    id: str
    model: str
    results: Annotated[list[RankedDocument], about("Best first.")]
    usage: PoolingUsage
    warnings: list[FieldWarning] | UnsetType = UNSET


# -- records


class _Vector(Struct):
    embedding: msgspec.Raw


class _Vectors(Struct):
    data: list[_Vector]


def vectors_summary(body: bytes) -> dict[str, Any] | None:
    """What a record keeps of a reply with embeddings, which are megabytes of numbers that mean nothing to a reader: how many, of
    what size, and the hash of the reply. None if it is another reply."""
    if b'"embedding"' not in body[:4096]:
        return None
    try:
        vectors = msgspec.json.decode(body, type=_Vectors).data
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return {
        "num_embeddings": len(vectors),
        "dimensions": _dimensions(bytes(vectors[0].embedding)) if vectors else 0,
        "bytes": len(body),
        "sha256": hashlib.sha256(body).hexdigest(),
    }


def _dimensions(vector: bytes) -> int:
    """Of a list of numbers, or of float32 in base64."""
    if vector.startswith(b'"'):
        return (len(vector.strip(b'"').rstrip(b"=")) * 3 // 4) // 4
    return vector.count(b",") + 1
