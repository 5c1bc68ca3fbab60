"""GBNF to Lark: the same language, or a refusal that names the line."""

from __future__ import annotations

import pytest

from tests.fakes.grammars import accepts
from tonle.engine.grammar.gbnf import gbnf_to_lark, is_gbnf
from tonle.engine.request import StructuredOutput
from tonle.errors import InvalidRequest

ARITHMETIC = """
# sums, as llama.cpp's examples write them
root  ::= expr "=" ws term
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \\t]*
"""


@pytest.mark.parametrize(("grammar", "good", "bad"), [
    (ARITHMETIC, ["a+1=2", "(a*2)-b = c", "((1))=1"], ["a+=1", "1", "(1=1"]),
    ('root ::= "a" | "b"\n | "c"', ["a", "b", "c"], ["d", "ab"]),
    ('root ::= item{2,3}\nitem ::= "x" [0-9]{2}', ["x12x34", "x12x34x56"], ["x12", "x1x2"]),
    ('root ::= "a"{2} "b"{1,}', ["aab", "aabb"], ["ab", "aa"]),
    (r'root ::= "\"\\\n\t" "\x41" "\u1780" "\U0001F600"', ['"\\\n\tAក😀'], ["x"]),
    (r'root ::= [^a-c\]"]+', ["xyz", "ខ"], ["a", "]", '"']),
    ("root ::= [a-] [-a] [\\-x] [.] .", ["-a-.\n", "a-x.z"], ["b--.z", "--zxz"]),
    ('root ::= ( | "b") "c"', ["c", "bc"], ["b"]),
    ('root ::= "a" ("b" "c")? ("d")*', ["a", "abc", "abcdd"], ["ab"]),
    ('root ::= my-Rule my_rule\nmy-Rule ::= "1"\nmy_rule ::= "2"', ["12"], ["11"]),
    ('root ::= "[" (root ("," root)*)? "]"', ["[]", "[[],[[]]]"], ["[", "[,]"]),
    ("root ::=\n  \"a\"\n  b\nb ::= \"c\" # end", ["ac"], ["a"]),
    ('root ::= "/" [/] "//" ', ["////"], ["///"]),
])  # fmt: skip
def test_the_language_is_the_same(grammar: str, good: list[str], bad: list[str]) -> None:
    structured = StructuredOutput(grammar=grammar)
    assert [answer for answer in good if not accepts(structured, answer)] == []
    assert [answer for answer in bad if accepts(structured, answer)] == []


@pytest.mark.parametrize(("grammar", "words"), [
    ('start ::= "a"', "no rule `root`"),
    ('root ::= a\na ::= missing', "refers to 'missing' in its rule 'a' (line 2)"),
    ('root ::= "a"\nroot ::= "b"', "defines 'root' twice (line 2)"),
    ('root ::= ("a"', "not closed before line 1"),
    ('root ::= ("a"\nb ::= "c")', "not closed before line 2"),
    ('root ::= "a")', "not opened (line 1)"),
    ('root ::= *', "repeats nothing at line 1"),
    ('"a"\nroot ::= "b"', "begin with a rule"),
    ('root ::= "a', "cannot be read at line 1"),
    ('root ::= []', "empty set"),
    ('root ::= "\\x4"', "too few digits"),
    ('root ::= "\\ud800"', "no character"),
    ('root ::= "a" (= "b")', "a lookahead assertion, (= …) at line 1, which is not supported"),
    ('root ::= TagDispatch(("a", b))', "TagDispatch(…) at line 1"),
    ("root ::= " + "".join(f'r{i}\nr{i} ::= ' for i in range(2_100)) + '"a"', "rules; at most 400"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused(grammar: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        gbnf_to_lark(grammar)
    assert words in caught.value.message


def test_lark_is_told_apart() -> None:
    assert is_gbnf('  root ::= "a"')
    assert not is_gbnf('start: "root ::= a"\n')
    assert not is_gbnf("start: a\na: /x/")
