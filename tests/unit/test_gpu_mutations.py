"""The verdicts of `python -m tests.gpu.mutations`: what counts as seen."""

from __future__ import annotations

from tests.gpu.mutations import MUTATIONS, read_report
from tests.gpu.patches import PATCHES

CASE = '<testcase classname="tests.gpu.test_features" name="test_one_row[{model}-bfloat16]">{inside}</testcase>'
WRONG = '<failure message="AssertionError: a token is not the best" />'


def report(*cases: tuple[str, str]) -> str:
    inside = "".join(CASE.format(model=model, inside=text) for model, text in cases)
    return f"<testsuites><testsuite>{inside}</testsuite></testsuites>"


def test_seen_if_each_model_has_a_wrong_comparison() -> None:
    both = ("window", "windows")
    found = read_report(report(("window", WRONG), ("window", ""), ("windows", WRONG)), both, 1.0)
    assert (found.tests, found.num_failed, found.sees(both)) == (3, 2, True)
    assert not read_report(report(("window", WRONG), ("windows", "")), both, 1.0).sees(both)


def test_an_error_is_not_a_comparison() -> None:
    for inside in ('<error message="boom" />', '<failure message="CannotPatchError: gone" />'):
        found = read_report(report(("window", inside)), ("window",), 1.0)
        assert found.broken and not found.sees(("window",))


def test_nothing_ran() -> None:
    assert read_report(report(("window", "<skipped />")), ("window",), 1.0).broken == ["no test ran"]


def test_adapters_are_told_by_their_file() -> None:
    text = (
        f'<testsuite><testcase classname="tests.gpu.test_adapters" name="test_one_row">{WRONG}</testcase></testsuite>'
    )
    where = ("tests/gpu/test_adapters.py",)
    assert read_report(text, where, 1.0).sees(where)


def test_every_mutation_has_a_patch() -> None:
    assert MUTATIONS.keys() == PATCHES.keys()
