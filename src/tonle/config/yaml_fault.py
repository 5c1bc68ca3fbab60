"""What is wrong with a text that is not YAML, in a few words.

Does: say the place, and the reason where it names no more than a character. Does not: quote the text, which may hold keys.
"""

from __future__ import annotations

from typing import Any


def yaml_fault(error: Any) -> str:
    """Of a `yaml.YAMLError`. Example: "line 2, column 5: mapping values are not allowed here"."""
    from yaml.parser import ParserError
    from yaml.scanner import ScannerError

    mark = getattr(error, "problem_mark", None)
    if mark is None:  # a character that YAML does not allow
        return str(getattr(error, "reason", "it cannot be read"))
    why = error.problem if isinstance(error, ParserError | ScannerError) else "it cannot be read"
    return f"line {mark.line + 1}, column {mark.column + 1}: {why}"
