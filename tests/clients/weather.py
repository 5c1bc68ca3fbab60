"""Tools and schemas for clients of a very small model: every answer ends within its tokens, because all values are bounded."""

from __future__ import annotations

from typing import Any, Literal

import jsonschema
from pydantic import BaseModel, Field

MAX_TOKENS = 96
QUESTION: Any = [{"role": "user", "content": "How is the weather in Phnom Penh?"}]

# The arguments of each tool. `additionalProperties: false` and all of them required, as strict mode asks.
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Phnom Penh", "Siem Reap", "Battambang"]},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "get_time": {
        "type": "object",
        "properties": {"zone": {"type": "string", "enum": ["Asia/Phnom_Penh", "UTC"]}},
        "required": ["zone"],
        "additionalProperties": False,
    },
    "set_alarm": {
        "type": "object",
        "properties": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}, "loud": {"type": "boolean"}},
        "required": ["hour", "loud"],
        "additionalProperties": False,
    },
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": name.replace("_", " "), "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


def tool_choice(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def check_call(name: str, arguments: dict[str, Any]) -> None:
    jsonschema.validate(arguments, SCHEMAS[name])


class Report(BaseModel):
    """The weather of one city."""

    city: Literal["Phnom Penh", "Siem Reap"]
    sky: Literal["clear", "clouds", "rain"]
    celsius: int = Field(ge=0, le=45)
    windy: bool
