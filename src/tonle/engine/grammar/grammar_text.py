"""What a caller asks of an answer's text, as a grammar that llguidance reads.

Does: take each form (`StructuredOutput`), check it against the limits, write the grammar. Quick, without torch or llguidance: it
runs where requests come in. Does not: compile; a mistake that only shows then is told by `GrammarCompiler`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tonle.engine.grammar.gbnf import gbnf_to_lark, is_gbnf
from tonle.engine.grammar.json_schema import grammar_of, json_grammar
from tonle.engine.grammar.lark import lark_string, regex_literal
from tonle.engine.grammar.limits import (
    MAX_CHOICES,
    MAX_RULES,
    check_bytes,
    check_text_depth,
    refuse,
)
from tonle.engine.grammar.structural_tag import tag_grammar
from tonle.engine.request import StructuredOutput

_FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
# Possessive: one pass, whatever the text.
_RULE = re.compile(r"^[ \t]*+[?!]*+[A-Za-z_][\w-]*+(?:\[[^\]\n]*+\])?+[^\n:\"/|]*+:", re.MULTILINE)


def grammar_text(structured: StructuredOutput, special_tokens: Mapping[str, int] | None = None) -> str:
    """Raises `InvalidRequest`, which says what is wrong. `special_tokens`: the model's, by their text, for structural tags."""
    given = [
        name
        for name in _FORMS
        if getattr(structured, name) is not None and (name != "json_object" or structured.json_object)
    ]
    if len(given) != 1:
        refuse(
            f"structured output takes exactly one of {', '.join(_FORMS)}; "
            + (f"{' and '.join(given)} were given" if given else "none was given")
        )
    match given[0]:
        case "json":
            assert structured.json is not None
            return json_grammar(structured.json)
        case "json_object":
            return json_grammar({"type": "object"})
        case "regex":
            return grammar_of(lark_grammar=f"start: {regex_literal(structured.regex)}\n")
        case "choice":
            return _from_choice(structured.choice)
        case "grammar":
            return _from_grammar(structured.grammar)
        case _:
            return grammar_of(lark_grammar=tag_grammar(structured.structural_tag, special_tokens or {}))


def _from_choice(choice: object) -> str:
    if not isinstance(choice, list) or not choice or not all(isinstance(text, str) for text in choice):
        refuse("choice must be a list of at least one string")
    if len(choice) > MAX_CHOICES:
        refuse(f"choice has {len(choice)} texts; at most {MAX_CHOICES} are taken")
    check_bytes("choice", sum(len(text.encode(errors="replace")) for text in choice))
    texts = dict.fromkeys(choice)  # in the caller's order, each once
    # One terminal: as a rule, each text would be a way to go on, and of these there may be 2,000 at a time.
    return grammar_of(lark_grammar="start: CHOICE\nCHOICE: " + " | ".join(lark_string(text) for text in texts) + "\n")


def _from_grammar(grammar: object) -> str:
    if not isinstance(grammar, str) or not grammar.strip():
        refuse("grammar must be the text of a grammar: Lark (start: …) or GBNF (root ::= …)")
    check_bytes("the grammar", len(grammar.encode(errors="replace")))
    check_text_depth("the grammar", grammar)
    if is_gbnf(grammar):
        grammar = gbnf_to_lark(grammar)
    elif (count := len(_RULE.findall(grammar))) > MAX_RULES:
        refuse(f"the grammar has {count} rules; at most {MAX_RULES} are taken")
    return grammar_of(lark_grammar=grammar)
