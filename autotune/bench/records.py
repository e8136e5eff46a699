"""Parts of the benchmark's records: how a variant was timed, summaries of its times, and ratios to baselines."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..measuring.timers import PROTOCOL
from ..records.spread import p99
from ..records.summaries import summary
from .variants import Variant, bare_name, segments_name, truncated_name

#: Requests of each round for the host time: a 99th percentile needs many.
REQUESTS = 20
#: Host and device summaries of one run, by variant.
Times = Mapping[str, tuple[dict[str, Any], dict[str, Any]]]


def protocol_of(variant: Variant, rounds: int, inputs: int) -> dict[str, Any]:
    """Return how a variant is timed; None is what a variant that failed was too early for."""
    return {
        "rounds": rounds,
        "warm_up": None,
        "repeat": None,
        "requests": REQUESTS,
        "captures": variant.captures,
        "inputs": inputs,
        **PROTOCOL,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
    }


def summary_with_p99(by_capture: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Summarise single requests; a 99th percentile of means of several would say nothing."""
    return {**summary(by_capture), "p99": p99([value for values in by_capture for value in values])}


def paired_with(variant: Variant, times: Times) -> list[dict[str, Any]]:
    """Return the baselines of a variant that were timed in the same run, with the ratios to them."""
    pairs = []
    roles = {
        "bare": bare_name(variant.trunk),
        "truncated": truncated_name(variant.trunk),
        "segments": segments_name(variant.trunk),
        "plain": variant.plain,
    }
    for role, baseline in roles.items():
        if baseline is None or baseline not in times:
            continue
        pair: dict[str, Any] = {"role": role, "variant": baseline}
        for kind, own, other in zip(("host", "device"), times[variant.name], times[baseline], strict=True):
            pair[f"{kind}_us"] = other["median"]
            pair[f"{kind}_ratio"] = own["median"] / other["median"]
        pairs.append(pair)
    return pairs
