"""`RopeSpec` from the settings of a Hugging Face config.

Does: old and new spellings, every kind of scaling in `rope.py`. Does not: compute angles.
"""

from __future__ import annotations

import math

from tonle.errors import ModelError
from tonle.models.config_values import Config, number, optional_number, whole_number
from tonle.models.families import Family
from tonle.models.spec import RopeSpec

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers, as `layer_types` of a config calls them


def hf_rope(config: Config, row: Family, head_dim: int, layer_type: str = FULL) -> RopeSpec:
    """Of layers of this type. `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    options: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if layer_type in options:
        options = options[layer_type]
    elif layer_type == SLIDING and "rope_local_base_freq" in row.defaults:  # scaling concerns the others
        options = {"rope_theta": config["rope_local_base_freq"]}
    kind = options.get("rope_type") or options.get("type") or "default"
    usual = row.defaults.get("rope_theta", 10_000.0)
    theta = number(options, "rope_theta", number(config, "rope_theta", usual))
    rotated = rotated_part(config, options, row, head_dim)
    max_positions = whole_number(config, "max_position_embeddings")
    in_scaling = number(options, "original_max_position_embeddings", max_positions)
    original = int(number(config, "original_max_position_embeddings", in_scaling))
    if kind in ("longrope", "su") or options.get("long_factor"):  # Phi-3 has called it yarn, too
        return _longrope(theta, rotated, max_positions, original, options)
    try:
        if kind == "default":
            return RopeSpec(theta=theta, rotated=rotated)
        if kind == "linear":
            return RopeSpec(theta=theta, kind="linear", factor=_setting(options, "factor"), rotated=rotated)
        if kind == "llama3":
            return RopeSpec(
                theta=theta, kind="llama3", factor=_setting(options, "factor"), original_max_positions=original,
                low_freq_factor=_setting(options, "low_freq_factor"), high_freq_factor=_setting(options, "high_freq_factor"),
                rotated=rotated,
            )  # fmt: skip
        if kind == "yarn":
            factor = number(options, "factor", max_positions / original)
            return yarn(theta, original, {**options, "factor": factor}, rotated)
    except KeyError as error:
        raise ModelError(f"rope scaling {kind!r} lacks the setting {error}") from None
    raise ModelError(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3, yarn, longrope")


def _setting(options: Config, key: str) -> float:
    """One that must be there; `KeyError` if it is not."""
    if options.get(key) is None:
        raise KeyError(key)
    return number(options, key, 1.0)


def rotated_part(config: Config, options: Config, row: Family, head_dim: int) -> int | None:
    """`RopeSpec.rotated`."""
    part = number(options, "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0))
    if part == 1:
        return None
    if "partial_rotary_factor" not in row.defaults:
        raise ModelError(
            "rotary positions on a part of each head (partial_rotary_factor) are not supported in this architecture"
        )
    return int(head_dim * part)


def yarn(theta: float, original: int, options: Config, rotated: int | None = None) -> RopeSpec:
    factor = _setting(options, "factor")
    if theta <= 1 or original < 1:
        raise ModelError(
            f"rope scaling 'yarn' needs a rope_theta above 1 and an original context of a token or more, not {theta:g} and "
            f"{original}"
        )

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = optional_number(options, "attention_factor")
    if attention_factor is None:
        top, bottom = (
            optional_number(options, key) if options.get(key) else None for key in ("mscale", "mscale_all_dim")
        )
        attention_factor = magnitude(top) / magnitude(bottom) if top and bottom else magnitude(1.0)
    return RopeSpec(
        theta=theta, kind="yarn", factor=factor, original_max_positions=original,
        beta_fast=number(options, "beta_fast", 32.0), beta_slow=number(options, "beta_slow", 1.0),
        truncate=bool(options.get("truncate", True)), attention_factor=attention_factor, rotated=rotated,
    )  # fmt: skip


def _longrope(theta: float, rotated: int | None, max_positions: int, original: int, options: Config) -> RopeSpec:
    for name in ("short_factor", "long_factor"):
        if name not in options:
            raise ModelError(f"rope scaling 'longrope' lacks the setting {name!r}")
    factor = number(options, "factor", max_positions / original)
    attention_factor = optional_number(options, "attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeSpec(
        theta=theta, kind="factors", factors=_factors(options, "short_factor"),
        long_factors=_factors(options, "long_factor"), original_max_positions=original,
        attention_factor=attention_factor, rotated=rotated,
    )  # fmt: skip


def _factors(options: Config, key: str) -> tuple[float, ...]:
    values = options[key]
    if not isinstance(values, list | tuple) or not values:
        raise ModelError(f"rope scaling 'longrope' should have a list of numbers as {key}, not {values!r}")
    return tuple(number({key: value}, key, 1.0) for value in values)


def stretched(max_positions: int, ropes: tuple[RopeSpec | None, ...]) -> int:
    """With yarn, the config may still name the context from before it was stretched; with factors for long contexts, what
    serves without them is the original one (`ModelSpec.for_context`)."""
    for rope in ropes:
        if rope is not None and rope.kind == "yarn":
            return max(max_positions, int(rope.original_max_positions * rope.factor))
        if rope is not None and rope.long_factors:
            return min(max_positions, rope.original_max_positions)
    return max_positions
