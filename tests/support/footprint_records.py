"""Hand-made records of footprints: heads that cost more the more room they take; no number was measured."""

from auxhead.autotune.measuring.cells import resnet_cell
from auxhead.autotune.records.comparison import compare
from auxhead.autotune.records.record import Record
from auxhead.autotune.records.summaries import as_json, percentiles, summary
from support.pretended_gpu import ENVIRONMENT

TRUNK_US = 160.0
#: The share of all warps that each takes.
SHARES = {
    "by rule": 0.0006, "programs /4": 0.0002, "programs /2": 0.0003, "programs x2": 0.0011, "programs x4": 0.0021,
    "programs x8": 0.0034, "2 warps a program": 0.0002, "16 warps a program": 0.0012, "64 registers": 0.0006,
    "4 SMs": 0.0001, "16 SMs": 0.0003, "same priority": 0.0006, "programs x8, same priority": 0.0034,
}  # fmt: skip


def failed_record(variant="by rule", batch=1):
    cell = resnet_cell("resnet18", "float16", batch, 10, "stages").as_json()
    return Record("footprint", cell, variant, "r", ENVIRONMENT, {}, error="OutOfResources: no")


def records(batch=1, fails=None, added=lambda share: 0.5 + 4000.0 * share):
    """One of each; ``added`` are microseconds by the share of warps, and ``fails`` names one that does not run."""
    cell = resnet_cell("resnet18", "float16", batch, 10, "stages").as_json()
    return [
        failed_record(name, batch)
        if name == fails
        else Record(
            "footprint", cell, name, "r", ENVIRONMENT,
            **as_json(_measured(name, share, added(share) * (3.0 if "priority" in name else 1.0))),
        )
        for name, share in SHARES.items()
    ]  # fmt: skip


def _measured(name, share, cost):
    trunk, both = ([[us] * 3, [us * 1.001] * 3] for us in (TRUNK_US, TRUNK_US + cost))
    ratio, low, high = compare(both, trunk)
    paired = [{"role": "trunk", "device_us": summary(trunk), "device_ratio": ratio, "low": low, "high": high}]
    paired.append({"role": "heads", "device_us": summary([[12.0] * 3] * 2)})
    residency = {
        "warps_share": percentiles([share * part for part in (0.9, 1.0, 1.1)]),
        "sm_share": percentiles([20 * share * part for part in (0.9, 1.0, 1.1)]),
    }
    measured = {"programs": round(70_000 * share), "hiding_efficiency": percentiles([0.7])}
    measured["occupancy"] = {"residency": residency}
    protocol = {"captures": 2, "rounds": 3, "forks": ["layer1", "layer3"]}
    return {"protocol": protocol, "device_us": summary(both), "paired": paired, "measured": measured}
