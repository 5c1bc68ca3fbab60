"""The measured advice: settings take turns, and ratios are taken within a repeat."""

from __future__ import annotations

from contextlib import nullcontext

from benchmarks.advice import Case, Figures, cases, jobs_of, rows, run_case


def test_settings_take_turns_with_the_same_seeds() -> None:
    calls: list[tuple[str, int]] = []

    def work(engine: str, seed: int) -> Figures:
        calls.append((engine, seed))
        return Figures(1.0, 1.0, 1.0)

    case = Case("x", "x", {name: (lambda name=name: nullcontext(name), work) for name in ("a", "b")})
    found = run_case(case, 2, iter(range(10)))
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("b", 2), ("a", 2)]  # the first ones warm up
    assert {name: len(runs) for name, runs in found.items()} == {"a": 2, "b": 2}


def test_rows_compare_with_the_first_setting_within_a_repeat() -> None:
    slow = [Figures(10.0, 2.0, None, {"hits": 1}), Figures(100.0, 0.2, None, {"hits": 3})]
    fast = [Figures(40.0, 1.0, None, {"hits": 5}), Figures(400.0, 0.1, None, {"hits": 5})]
    assert rows(Case("x", "load", {}), {"off": slow, "on": fast}) == [
        ("x", "load: off", "55 (1.00×)", "1.10 s (1.00×)", "", "2 hits"),
        ("x", "load: on", "220 (4.00×)", "550 ms (0.50×)", "", "5 hits"),
    ]


def test_each_case_has_a_name_of_its_own_and_something_to_compare() -> None:
    known = cases(None, "cpu")
    assert len({case.name for case in known}) == len(known) and all(len(case.settings) > 1 for case in known)


def test_prompts_share_what_they_should() -> None:
    jobs = jobs_of(3, 4, (2, 5), seed=1, shared=6)
    assert len({tuple(prompt[:6]) for prompt, _ in jobs}) == 1 and len({tuple(prompt) for prompt, _ in jobs}) == 3
    assert all(len(prompt) == 10 and 2 <= count <= 5 for prompt, count in jobs)
