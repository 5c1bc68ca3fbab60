"""Which arm of an experiment somebody is in: a pure function of their name, so it never changes and needs no memory."""

from __future__ import annotations

import hashlib

from tonle.config.routing import ArmConfig, ExperimentConfig


def assign(experiment: ExperimentConfig, subject: str) -> ArmConfig | None:
    """None: not part of the experiment."""
    if _draw(experiment.name, "share", subject) >= experiment.share:
        return None
    place = _draw(experiment.name, "arm", subject) * sum(arm.weight for arm in experiment.arms)
    for arm in experiment.arms:
        place -= arm.weight
        if place < 0:
            return arm
    return experiment.arms[-1]


def _draw(experiment: str, purpose: str, subject: str) -> float:
    """Uniform in [0, 1), the same for the same words."""
    digest = hashlib.blake2b(f"{experiment}\0{purpose}\0{subject}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64
