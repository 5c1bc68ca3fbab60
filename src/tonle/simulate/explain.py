"""What a simulation assumes, in words; and its servers as settings of a report.

Does: describe. Does not: simulate or print.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec

from tonle.bench.options import BenchOptions
from tonle.simulate.fleet import Fleet, ReplicaOptions
from tonle.simulate.profile import Profile
from tonle.simulate.result import SimulationResult

_SAME = (
    "Simulated with the real code: the engine's scheduler with its KV blocks and prefix cache",
    "the gateway's router, queue and circuit breakers",
)
_NOT = (
    "Not simulated: text that ends an answer early (each has the length asked for), stop strings, structured output, adapters, "
    "speculation, the network between client and server beyond what the profile measured, other programs on the machine."
)


def fleet_title(fleet: Fleet, profiles: list[Profile]) -> str:
    """In place of a server's address."""
    devices = " and ".join(dict.fromkeys(profile.server.device_name for profile in profiles))
    count = len(fleet.replicas)
    return f"{count} simulated replica{'' if count == 1 else 's'} on {devices}"


def fleet_settings(fleet: Fleet, profiles: list[Profile]) -> dict[str, Any]:
    """For a saved report: all that is needed to simulate the same again."""
    default = Fleet(replicas=[])
    names = [each.name for each in dataclasses.fields(fleet) if each.name != "replicas"]
    other = {name: value for name in names if (value := getattr(fleet, name)) != getattr(default, name)}
    return {
        "replicas": [_replica_settings(options) for options in fleet.replicas],
        "profiles": [
            {"model": each.server.model, "device": each.server.device_name, "made_at": each.made_at}
            for each in profiles
        ],
        **msgspec.to_builtins(other),
    }


def _replica_settings(options: ReplicaOptions) -> dict[str, Any]:
    limits = dataclasses.asdict(options.limits)
    rest = {
        each.name: value
        for each in dataclasses.fields(options)
        if each.name not in ("times", "limits", "targets") and (value := getattr(options, each.name)) != each.default
    }
    return {**rest, "limits": limits}


def explain(options: BenchOptions, fleet: Fleet, profiles: list[Profile]) -> str:
    """Some lines about what is simulated."""
    lines = [", ".join(_SAME) if fleet.has_gateway else _SAME[0], *_profile_lines(profiles), *_fleet_lines(fleet)]
    lines.append(_load_line(options))
    lines.append(_NOT)
    return "\n".join(f"- {line}" for line in lines)


def remarks(fleet: Fleet, result: SimulationResult) -> list[str]:
    """What the reader of the numbers should know about them."""
    notes = []
    if fleet.has_gateway and result.replicas:
        options, replica = fleet.replicas[-1], max(result.replicas, key=lambda each: each.max_running)
        most = options.max_concurrent or fleet.max_concurrent
        if replica.max_running >= most < options.limits.max_num_seqs:
            notes.append(
                f"the gateway sends {most} requests at once to a replica that computes {options.limits.max_num_seqs}: the others "
                f"wait at the gateway; --max-concurrent {options.limits.max_num_seqs} would let them in"
            )
    if sum(replica.preemptions for replica in result.replicas):
        notes.append(
            "KV blocks ran out: requests were preempted and computed again; fewer at once (max_num_seqs) may be faster"
        )
    return notes


def _profile_lines(profiles: list[Profile]) -> list[str]:
    lines = []
    for profile in {id(each): each for each in profiles}.values():
        server = profile.server
        fits = {fit.kind: fit for fit in profile.fits}
        error = f"; steps are predicted within {fits['all'].median_error:.1%} (median)" if "all" in fits else ""
        lines.append(
            f"Step times: {server.model} ({server.dtype}) on {server.device_name}, measured {profile.made_at[:10]} with "
            f"{server.max_num_seqs} requests and {server.max_num_batched_tokens} tokens per step{error}"
        )
    return lines


def _fleet_lines(fleet: Fleet) -> list[str]:
    lines = []
    for options, count in _groups(fleet.replicas):
        limits = options.limits
        kind = f", role {options.role}" if options.role != "any" else ""
        kind += f", length {options.length}" if options.length != "any" else ""
        lines.append(
            f"{count} replica{'' if count == 1 else 's'}{kind}: {limits.max_num_seqs} requests and "
            f"{limits.max_num_batched_tokens} tokens per step, {limits.long_prefill_tokens} of one prompt; "
            f"{options.num_blocks * limits.block_size} tokens of KV cache; "
            f"prefix cache {'on' if limits.prefix_caching else 'off'}"
        )
    if fleet.has_gateway:
        lines.append(
            f"Gateway: {fleet.max_concurrent} requests at once for each replica, {fleet.max_queued} in its queue, "
            f"prefix affinity {'on' if fleet.prefix_affinity else 'off'}"
        )
    else:
        lines.append("No gateway: requests go to the server, which admits all of them")
    if any(options.role == "prefill" for options in fleet.replicas):
        lines.append(_transfer_line(fleet))
    if fleet.autoscaling is not None:
        rule = fleet.autoscaling
        target = "" if rule.metric == "schedule" else f"target {rule.target:g} per replica, "
        lines.append(
            f"Autoscaling by {rule.metric}: {target}{rule.min} to {rule.max} replicas, decided every {rule.every_s:g} s, "
            f"{rule.cold_start_s:g} s until a new one serves"
        )
    lines += [
        f"Replica {each.replica} dies at {each.at_s:g} s"
        + ("" if each.restart_s is None else f" and serves again {each.restart_s:g} s later")
        for each in fleet.failures
    ]
    return lines


def _transfer_line(fleet: Fleet) -> str:
    if not fleet.kv_bytes_per_token or math.isinf(fleet.kv_bytes_per_s):
        return "Keys and values reach the replica that answers at no cost: set kv_bytes_per_token and kv_bytes_per_s to count it"
    ms = 1e3 * (fleet.kv_latency_s + 1000 * fleet.kv_bytes_per_token / fleet.kv_bytes_per_s)
    return f"Keys and values of 1000 tokens take {ms:.1f} ms from a prefill replica to the one that answers"


def _groups(replicas: list[ReplicaOptions]) -> list[tuple[ReplicaOptions, int]]:
    """Replicas that are alike but for their names."""
    found: list[tuple[ReplicaOptions, int]] = []
    for options in replicas:
        nameless = dataclasses.replace(options, name=None)
        for place, (known, count) in enumerate(found):
            if known == nameless:
                found[place] = (known, count + 1)
                break
        else:
            found.append((nameless, 1))
    return found


def _load_line(options: BenchOptions) -> str:
    if options.replay is not None:
        return (
            f"Requests: those of {options.replay} at their recorded times, {options.speed:g} times as fast, with the recorded "
            "counts of tokens"
        )
    if options.file is not None:
        return (
            f"Requests: those of {options.file}; texts are not tokenized: four ASCII characters, or three bytes of other "
            "scripts, count as a token"
        )
    return (
        f"Requests: {options.input_tokens} tokens in, {options.output_tokens} out, the same that `tonle bench` sends with "
        f"--seed {options.seed}"
    )
