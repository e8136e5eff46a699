"""Fakes for heads alone: a measurer with made-up times, and records of it."""

from auxhead.autotune.heads.run import Head, HeadRecords
from auxhead.autotune.measuring.head_timing import COPIED
from auxhead.autotune.measuring.heads_alone import PEERS
from auxhead.autotune.records.comparison import Paired
from auxhead.autotune.records.record import Record
from support.pretended_gpu import ENVIRONMENT
from support.sweep_fakes import PROTOCOL, small_target

#: Speed of copies of ``COPIED`` bytes.
COPIES = [[1000.0] * 3]
HOW = {**PROTOCOL, "rounds": 20, "captures": 5}
US = {"fused": 4.0, "eager": 18.0, "compiled": 8.0}


def times_of(us):
    """Five captures whose medians are 99 to 101 % of ``us``, in three rounds alike."""
    return [[us * (1 + part / 200)] * 3 for part in (-2, -1, 0, 1, 2)]


def timed(us=US):
    """What a measurer returns."""
    return {variant: Paired(times_of(us[variant]), times_of(us["fused"]), "run") for variant in PEERS}


def head_of(**target):
    one = small_target(**target)
    return Head({**one.shape._asdict(), "model": one.model, "tap": ", ".join(one.taps)}, one.rule, COPIED // 1000)


def records_at(out, environment=None, protocol=None):
    return HeadRecords(out, {**ENVIRONMENT, **(environment or {})}, {**HOW, **(protocol or {})})


def head_record(variant, run="r1", us=None, pair=None, error=None, gpu="H200", **cell):
    """A record as it would stand in a file, its numbers written by hand."""
    shape = {
        "samples": 8, "channels": 64, "height": 1, "width": 3136, "grid_h": 1, "grid_w": 1, "layout": "channels_last",
        "pool": "avg", "classes": 10, "dtype": "float16", "model": "resnet18", "tap": "layer1",
    }  # fmt: skip
    paired = [] if pair is None else [{"role": "fused", "device_ratio": pair[0], "low": pair[1], "high": pair[2]}]
    return Record(
        kind="heads",
        cell={**shape, **cell},
        exits="never",
        variant=variant,
        run=run,
        utc="",
        environment={"gpu": gpu, "torch": "2.11"},
        protocol={"bytes": 1000, "bytes_per_second": 1e9} if variant == "bytes" else {},
        device_us=None if us is None else {"median": us, "p20": us - 0.25, "p80": us + 0.5, "captures": [us]},
        paired=paired,
        error=error,
    )


def a_head(run="r1", fused=3.5, **cell):
    """The records of one head."""
    return [
        head_record("fused", run, fused, **cell),
        head_record("eager", run, 1750.0, (5.004, 4.9, 5.096), **cell),
        head_record("compiled", run, 7.0, (2.0, 1.95, 2.051), **cell),
        head_record("bytes", run, 0.756, **cell),
    ]


def a_random_head(number=0, run=None, *, fused=4.0, ratio=2.0, compiled=None, error=None, **cell):
    """The records of one random head, as they would stand in a file."""
    cell = {
        "seed": 0, "number": number, "kind": "pooled", "input": [8, 64, 7, 7], "memory_format": "contiguous",
        "pool": "avg", "pool_size": 1, "hidden": 0, "activation": "relu", "norm": False, "classes": 10,
        "dtype": "float16", **cell,
    }  # fmt: skip
    peers = {"eager": ratio, "compiled": compiled}
    variants = {"fused": fused, **{name: one and fused * one for name, one in peers.items()}, "bytes": 0.8}

    def one(variant, us):
        protocol = {"bytes": 1000, "bytes_per_second": 1e9, "config": {"block_f": 1}}
        pair = [(peers[variant], 0.95 * peers[variant], 1.05 * peers[variant])] if variant in peers else []
        if error is not None and variant != "bytes":
            us, pair = None, []
        return Record(
            kind="random-heads", cell=cell, exits="never", variant=variant, run=run or f"r{number}",
            utc="2026-11-26T12:00:00+00:00", environment=ENVIRONMENT, protocol=protocol,
            device_us=us and {"median": us, "p20": us, "p80": us, "captures": [us]},
            paired=[{"role": "fused", "device_ratio": mid, "low": low, "high": high} for mid, low, high in pair],
            error=None if us is not None else error if variant == "fused" else "no baseline: the fused head failed",
        )  # fmt: skip

    return [one(variant, us) for variant, us in variants.items() if us is not None]
