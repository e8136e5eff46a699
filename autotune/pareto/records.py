"""Records of accuracy and time: one for each variant under each set of thresholds."""

from collections.abc import Mapping
from typing import Any

from ..bench.records import paired_with
from ..measuring.environment import clocks, environment
from ..measuring.subject import Subject
from ..measuring.timers import PROTOCOL
from ..records.record import Record
from ..records.summaries import network_record, summary
from .measure import OperatingPoint, Pareto, PointResult
from .tables import KIND


def pareto_records(
    measured: Pareto,
    subject: Subject,
    point: OperatingPoint,
    results: Mapping[str, PointResult],
    about: Mapping[str, Any],
    run: str,
) -> list[Record]:
    """Return the records of all variants under one set of thresholds; ``about`` goes into their protocol."""
    device = subject.example.device
    of_device = {**environment(device), "clocks": clocks(device)}
    times = {
        name: (summary(one.samples.host), summary(one.samples.device))
        for name, one in results.items()
        if one.samples is not None
    }
    found = []
    for variant in measured.variants:
        result = results[variant.name]
        fields: dict[str, Any] = {}
        if variant.name in times:
            host, of_call = times[variant.name]
            paired = paired_with(variant, times)
            for pair in paired:
                baseline = results[pair["variant"]].mean_host_us
                assert baseline is not None and result.mean_host_us is not None
                pair["mean_host_us"], pair["mean_host_ratio"] = baseline, result.mean_host_us / baseline
            details = {"samples": measured.samples, "accuracy": result.accuracy, "mean_host_us": result.mean_host_us}
            fields = {"host_us": host, "device_us": of_call, "paired": paired, "measured": details}
        protocol = {
            "rounds": measured.rounds,
            "captures": variant.captures,
            "inputs": len(subject.inputs),
            "repeat": 1,
            **PROTOCOL,
            "thresholds": dict(zip(subject.network.taps, point.thresholds, strict=True)),
            "samples_by_exit": result.samples_by_exit,
            **about,
        }
        found.append(
            network_record(
                KIND, subject.cell.as_json(), variant.name, of_device, exits=point.exits, run=run, protocol=protocol,
                correctness=result.counts, notes=measured.notes(variant), error=result.error, **fields,
            )
        )  # fmt: skip
    return found
