"""A fit through the median: coefficients that are never negative, errors that count relative to what is expected.

Does: linear models. Does not: know steps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_ROUNDS = 25  # of reweighting
_FLOOR = 0.005  # relative errors below this count as squares: the median of exact data is found, too
_LEAST = 1e-7  # expected, so that errors can be relative to it


def median_fit(columns: Floats, seconds: Floats) -> Floats:
    """Coefficients of at least 0 that make the expected time a median: least squares, reweighted until they are absolute."""
    expected = np.maximum(seconds, _LEAST)
    weights = np.ones(len(seconds))
    coefficients = np.zeros(columns.shape[1])
    for turn in range(_ROUNDS):
        scale = np.sqrt(weights) / expected
        coefficients = non_negative_least_squares(columns * scale[:, None], seconds * scale)
        # Damped: the expected time of a step changes the weight of its own error.
        now = np.maximum(columns @ coefficients, _LEAST)
        expected = now if turn == 0 else np.sqrt(expected * now)
        weights = 1.0 / np.maximum(np.abs(seconds / expected - 1.0), _FLOOR)
    return coefficients


def non_negative_least_squares(columns: Floats, values: Floats) -> Floats:
    """Lawson and Hanson's active set method, on the normal equations of columns scaled to length 1."""
    lengths = np.linalg.norm(columns, axis=0)
    lengths[lengths == 0] = 1.0
    scaled = columns / lengths
    matrix, right = scaled.T @ scaled, scaled.T @ values
    count = len(right)
    matrix[np.diag_indices(count)] += 1e-9  # columns that say the same share their weight
    solution, is_free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(3 * count):
        gradient = right - matrix @ solution
        gradient[is_free] = -np.inf
        if is_free.all() or gradient.max() <= 1e-10 * np.abs(right).max():
            break
        is_free[gradient.argmax()] = True
        while True:
            trial = np.zeros(count)
            trial[is_free] = np.linalg.solve(matrix[np.ix_(is_free, is_free)], right[is_free])
            bad = is_free & (trial <= 0)
            if not bad.any():
                solution = trial
                break
            share = np.min(solution[bad] / (solution[bad] - trial[bad]))
            solution += share * (trial - solution)
            is_free &= solution > 1e-14
            solution[~is_free] = 0.0
    answer: Floats = solution / lengths
    return answer
