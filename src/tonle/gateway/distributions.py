"""The distributions that the comparison of experiments needs, without a library for statistics.

Does: the normal distribution's and Student's t quantiles, the incomplete beta function. Does not: know what is compared.
"""

from __future__ import annotations

import math
from statistics import NormalDist


def normal_quantile(p: float) -> float:
    return NormalDist().inv_cdf(p)


def t_two_sided(t: float, freedom: float) -> float:
    """The probability of a value at least as far from 0 as `t`."""
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def t_quantile(p: float, freedom: float) -> float:
    """Of Student's distribution, for p above one half; found by halving."""
    low, high = 0.0, 1.0
    while t_two_sided(high, freedom) > 2 * (1 - p) and high < 1e9:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if t_two_sided(middle, freedom) > 2 * (1 - p):
            low = middle
        else:
            high = middle
    return high


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function, by its continued fraction (Lentz): Student's t needs it."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    tiny, c, d = 1e-300, 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    fraction = d
    for m in range(1, 300):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 + numerator * d
            d = 1 / (d if abs(d) > tiny else tiny)
            c = 1 + numerator / c
            c = c if abs(c) > tiny else tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-12:
            break
    return math.exp(log_front) * fraction / a
