"""Numbers with units, as data sheets and people write them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tonle.advise.units import (
    bytes_text,
    count_text,
    flops_text,
    parse_bandwidth,
    parse_bytes,
    parse_count,
    parse_flops,
)
from tonle.errors import ConfigError


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_count, "70B", 70_000_000_000),
        (parse_count, "1.5b", 1_500_000_000),
        (parse_count, "135M", 135_000_000),
        (parse_count, "128k", 128_000),
        (parse_count, "8192", 8192),
        (parse_bytes, "141GB", 141_000_000_000),
        (parse_bytes, "80GiB", 80 * 1024**3),
        (parse_bytes, "80G", 80 * 1024**3),
        (parse_bandwidth, "4.8TB/s", 4.8e12),
        (parse_bandwidth, "864 GB/s", 864e9),
        (parse_bandwidth, "864GBps", 864e9),
        (parse_bandwidth, "2TB", 2e12),
        (parse_flops, "990T", 990e12),
        (parse_flops, "990 TFLOPS", 990e12),
        (parse_flops, "1.98P", 1.98e15),
    ],
)
def test_reads(parse: Callable[[str, str], float], text: str, value: float) -> None:
    assert parse(text, "x") == pytest.approx(value)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_count, "many"),
        (parse_count, "0"),
        (parse_count, "-7B"),
        (parse_bytes, "141"),
        (parse_bytes, "0GB"),
        (parse_bandwidth, "fast"),
        (parse_flops, "990 horses"),
        (parse_flops, ""),
    ],
)
def test_refuses_with_the_flag_and_an_example(parse: Callable[[str, str], float], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(text, "own_number")
    assert "--own-number takes" in refused.value.message
    assert "such as" in refused.value.message
    assert repr(text) in refused.value.message


def test_writes() -> None:
    assert [bytes_text(value) for value in (327_680, 39.8e9, 141e9, 999.6e9)] == ["328 kB", "39.8 GB", "141 GB", "1 TB"]
    assert [count_text(value) for value in (70.56e9, 1.54e9, 135e6, 475_072)] == ["70.6B", "1.54B", "135M", "475k"]
    assert flops_text(989e12) == "989 T"
