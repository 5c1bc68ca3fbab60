"""Fields that say what the text of an answer must be: OpenAI's `response_format`, vLLM's, SGLang's and llama.cpp's.

Does: name them, with their types. Does not: choose between them, or check what they hold (`replica/read_structured.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Struct

from tonle.protocol.field_types import about
from tonle.protocol.fields import NO_EFFECT_MESSAGE, OtherFields


class JsonSchemaFormat(Struct, kw_only=True):
    name: Annotated[str | None, about("For people; has no effect on the answer.")] = None
    description: Annotated[str | None, about("For people; has no effect on the answer.")] = None
    schema: Annotated[dict[str, Any] | bool | None, about("A JSON schema.")] = None
    strict: Annotated[bool | None, about("Accepted; the schema is always enforced.")] = None


class ResponseFormat(Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: Annotated[JsonSchemaFormat | None, about("With type json_schema.")] = None
    structures: Annotated[
        list[dict[str, Any]] | None, about("With type structural_tag: parts with begin, schema and end.")
    ] = None
    triggers: Annotated[list[str] | None, about("With type structural_tag: what begins one of the structures.")] = None
    format: Annotated[dict[str, Any] | None, about("With type structural_tag: its newer form.")] = None


class StructuredOutputs(Struct, kw_only=True):
    """vLLM's. Exactly one of the first six."""

    # JSON is always written with one space after each comma and colon, and no other.
    other_fields: ClassVar = OtherFields(
        no_effect=dict.fromkeys(("disable_any_whitespace", "disable_fallback", "whitespace_pattern"), NO_EFFECT_MESSAGE)
    )

    json: Annotated[dict[str, Any] | bool | str | None, about("A JSON schema, or a string that holds one.")] = None
    regex: str | None = None
    choice: Annotated[list[str] | None, about("The answer is one of these.")] = None
    grammar: Annotated[str | None, about("Lark, or GBNF.")] = None
    json_object: Annotated[bool | None, about("Any JSON object.")] = None
    structural_tag: Annotated[dict[str, Any] | str | None, about("Free text with bound parts.")] = None
    disable_additional_properties: Annotated[
        bool | None, about("true is refused: put additionalProperties: false into the schema.")
    ] = None


class StructuredFields(Struct, kw_only=True):
    """At most one of them may be set."""

    response_format: Annotated[
        ResponseFormat | None, about("What the answer must be: JSON, or JSON of a schema. Default: any text.")
    ] = None
    structured_outputs: Annotated[StructuredOutputs | None, about("The same, as vLLM has it.")] = None
    guided_json: Annotated[dict[str, Any] | bool | str | None, about("A JSON schema (vLLM's older name).")] = None
    guided_regex: Annotated[str | None, about("A regular expression for the whole answer.")] = None
    guided_choice: Annotated[list[str] | None, about("The answer is one of these.")] = None
    guided_grammar: Annotated[str | None, about("Lark, or GBNF.")] = None
    guided_json_object: Annotated[bool | None, about("Any JSON object.")] = None
    json_schema: Annotated[
        dict[str, Any] | bool | str | None, about("A JSON schema, as SGLang and llama.cpp take it.")
    ] = None
    regex: Annotated[str | None, about("A regular expression for the whole answer (SGLang).")] = None
    ebnf: Annotated[str | None, about("A grammar in Lark or GBNF (SGLang).")] = None
    grammar: Annotated[str | None, about("A grammar in GBNF or Lark (llama.cpp).")] = None
    structural_tag: Annotated[dict[str, Any] | str | None, about("Free text with bound parts (SGLang).")] = None
    bad_words: Annotated[list[str] | None, about("Texts that must not occur in the answer.")] = None
    allowed_token_ids: Annotated[list[int] | None, about("The only tokens that an answer may be made of.")] = None
