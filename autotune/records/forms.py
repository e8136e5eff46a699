"""Forms of records, kind by kind: all that decisions, tables and figures read of them, checked as they are read."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .checks import (
    COUNT,
    LIST,
    NUMBER,
    OBJECT,
    POSITIVE,
    SAMPLES,
    TEXT,
    TRUTH,
    WHOLE,
    Form,
    Maybe,
    Roles,
    Value,
    checker,
    one_of,
)  # fmt: skip

#: Fields of a HeadShape, in its order; this and what follows is written out since what knows it imports torch.
SHAPE = ("samples", "channels", "height", "width", "grid_h", "grid_w", "layout", "pool", "classes", "dtype")
#: Fields of the shape that are words; the others are sizes.
WORDS = {
    "layout": ("channels_last", "contiguous", "strided"),
    "pool": ("avg", "max"),
    "dtype": ("float16", "bfloat16", "float32"),
}
#: Where heads are launched.
PLACES = ("alone", "network")
#: Kinds of footprints, one of which is in each name; those of the trunk's conditions go before others.
FOOTPRINTS = ("priority", "SMs", "registers", "warps", "programs", "by rule")

_PLAIN = Value("text, a number or null", lambda value: value is None or isinstance(value, (str, int, float)))
_SPREAD = dict.fromkeys(("median", "p20", "p80"), NUMBER)
_TIMES = {**_SPREAD, "median": POSITIVE}
_INTERVAL = dict.fromkeys(("device_ratio", "low", "high"), POSITIVE)
_RATIOS = dict.fromkeys(("host_us", "host_ratio", "device_us", "device_ratio"), POSITIVE)
_TIMED = {"rounds": COUNT, "captures": COUNT}
_SHAPE = {name: one_of(*WORDS[name]) if name in WORDS else COUNT for name in SHAPE}
_NETWORK = {
    **dict.fromkeys(("model", "dtype", "placement"), TEXT),
    **dict.fromkeys(("batch", "classes"), COUNT),
    "taps": [TEXT],
    "input": [COUNT],
    "heads": Maybe(TEXT, null=False),
}

#: Every record; see :class:`~auxhead.autotune.records.record.Record`.
_RECORD: dict[str, Form] = {
    **dict.fromkeys(("kind", "exits", "variant", "run", "utc"), TEXT),
    **dict.fromkeys(("cell", "protocol"), OBJECT),
    "environment": dict.fromkeys(("gpu", "sm_count", "driver", "torch", "triton", "cudnn", "cuda"), Maybe(_PLAIN)),
    **dict.fromkeys(("host_us", "device_us", "measured", "correctness"), Maybe(OBJECT)),
    **dict.fromkeys(("paired", "notes"), Maybe(LIST, null=False)),
    "error": Maybe(TEXT),
}


class _Kind(NamedTuple):
    """Form of the records of one kind, beyond that of every record."""

    always: Mapping[str, Form]
    """What failures have, too."""
    measured: Mapping[str, Form]
    more: Callable[[Mapping[str, Any], bool], None] = lambda values, failed: None
    """Checks what goes beyond single fields."""


_OF_NETWORK = {"trunk": Maybe(TEXT), "forks": Maybe([TEXT])}
_check_in_network = checker({"cell": {"model": TEXT, "tap": TEXT}})
_check_bytes = checker({"protocol": {"bytes": COUNT, "bytes_per_second": POSITIVE}})


def _check_one_pair(values: Mapping[str, Any], role: str) -> None:
    """Check that records of which a pair is read as the only one hold no other."""
    pairs = values.get("paired", [])
    if len(pairs) > 1 or any(not isinstance(pair, dict) or pair.get("role") != role for pair in pairs):
        raise ValueError(f"paired: got {pairs!r:.60}, wants a pair of role {role!r} alone")


def _more_of_sweep(values: Mapping[str, Any], failed: bool) -> None:
    _check_one_pair(values, "rule")
    if values["protocol"]["place"] == "network":
        _check_in_network(values)
    if not failed:
        (rule,) = (pair for pair in values["paired"] if pair["role"] == "rule")
        rounds, wanted = (len(one["samples"][0]) for one in (values["device_us"], rule))
        if rounds != wanted:
            raise ValueError(f"device_us.samples: got {rounds} rounds, wants {wanted}, those of the rule's")


def _more_of_heads(values: Mapping[str, Any], failed: bool) -> None:
    _check_one_pair(values, "fused")
    if values["variant"] == "bytes" and not failed:
        _check_bytes(values)


def _check_forks(values: Mapping[str, Any], failed: bool) -> None:
    taps = values["cell"]["taps"]
    for fork in [] if failed else values["protocol"]["forks"]:
        if fork not in taps:
            raise ValueError(f"protocol.forks: got {fork!r}, wants taps: {', '.join(taps)}")


def _more_of_timeline(values: Mapping[str, Any], failed: bool) -> None:
    _check_forks(values, failed)
    if failed:
        return
    launches, replay = len(values["protocol"]["forks"]), values["measured"]
    roles = [kernel["role"] for kernel in replay["kernels"]]
    side, join = roles.count("side"), roles.count("join")
    if side != launches or join > 1:
        raise ValueError(
            f"measured.kernels: got {side} of role 'side' and {join} of role 'join', wants {launches}, one for each "
            "fork, and at most 1"
        )
    for launch, *_ in replay["programs"]:
        if launch not in range(launches + 1):
            raise ValueError(f"measured.programs: got one of launch {launch}, wants 0 to {launches}")


_KERNEL = {
    "name": TEXT,
    "role": one_of("trunk", "side", "join"),
    **dict.fromkeys(("start_us", "duration_us"), NUMBER),
    **dict.fromkeys(("stream", "registers"), WHOLE),
    **dict.fromkeys(("grid", "block"), [WHOLE]),
}


def _row(words: str, numbers: int, texts: int = 0) -> Value:
    """Return the form of a list of so many numbers, and so many texts behind them."""

    def fits(one: Any) -> bool:
        if not isinstance(one, list) or len(one) != numbers + texts:
            return False
        return all(map(NUMBER.fits, one[:numbers])) and all(map(TEXT.fits, one[numbers:]))

    return Value(words, fits)


_INTERVALS = [[_row("[begin, end]", 2)]]
#: Parts of a network.
_PARTS: dict[str, Form] = {"trunk": {"device_us": _TIMES, **_INTERVAL}, "heads": {"device_us": _TIMES}}
#: Of a timeline.
_STRETCH = _row("[begin, end, role]", 2, texts=1)
_NULL_OR_NUMBER = Maybe(NUMBER, absent=False)
_FINDING = {
    **dict.fromkeys(("kind", "what", "remedy", "snippet"), TEXT),
    **dict.fromkeys(("evidence", "lines"), [TEXT]),
    "cost_us": _NULL_OR_NUMBER,
    "marks": [{"start_us": NUMBER, "end_us": NUMBER, "stream": Maybe(WHOLE, absent=False)}],
}

_KINDS = {
    "sweep": _Kind(
        {
            "cell": _SHAPE,
            "protocol": {**_TIMED, "place": one_of(*PLACES), "kernel": TEXT, **_OF_NETWORK},
        },
        {
            "device_us": {"median": POSITIVE, "samples": SAMPLES},
            "paired": Roles({"rule": {"variant": TEXT, "samples": SAMPLES}}),
        },
        _more_of_sweep,
    ),
    "heads": _Kind(
        {"cell": {**_SHAPE, "model": TEXT, "tap": TEXT}},
        {"device_us": _TIMES, "paired": Roles({}, {"fused": _INTERVAL})},
        _more_of_heads,
    ),
    "bench": _Kind(
        {"cell": _NETWORK, "protocol": _TIMED},
        {
            "host_us": {**_TIMES, "p99": Maybe(NUMBER, null=False)},
            "device_us": _TIMES,
            "paired": [{"role": TEXT, "variant": TEXT, **_RATIOS}],
            "correctness": Maybe({"differing": WHOLE, "samples": WHOLE}),
        },
    ),
    "overlap": _Kind(
        {"cell": _NETWORK},
        {
            "protocol": {**_TIMED, "forks": [TEXT], "replays": COUNT},
            "device_us": _TIMES,
            "paired": Roles(_PARTS),
            "measured": {
                **dict.fromkeys(("side_us", "exposed_us", "join_stall_us", "join_us"), _SPREAD),
                **dict.fromkeys(("bare_span_us", "span_us", "hiding_efficiency"), _SPREAD),
                "coverage": Maybe(_SPREAD, absent=False),
                "inflation": {"trunk": POSITIVE, "both": POSITIVE},
                "kernels": [{"name": TEXT, "bare_us": POSITIVE, "both_us": POSITIVE}],
            },
        },
        _check_forks,
    ),
    "timeline": _Kind(
        {"cell": _NETWORK},
        {
            "environment": {"sm_count": COUNT},
            "protocol": {"forks": [TEXT], "replays": COUNT},
            "measured": {
                **dict.fromkeys(("join_stall_us", "span_us", "clocks_differ_us", "recording_inflation"), NUMBER),
                "coverage": _NULL_OR_NUMBER,
                "kernels": [_KERNEL],
                "programs": [_row("[launch, SM, start, end]", 4)],
            },
        },
        _more_of_timeline,
    ),
    "footprint": _Kind(
        {"cell": _NETWORK},
        {
            "variant": Value(
                f"a name with one of: {', '.join(FOOTPRINTS)}", lambda name: any(one in name for one in FOOTPRINTS)
            ),
            "protocol": {**_TIMED, "forks": [TEXT]},
            "device_us": _TIMES,
            "paired": Roles(_PARTS, {"recorded": {"device_us": _TIMES}}),
            "measured": {
                "programs": COUNT,
                "hiding_efficiency": _SPREAD,
                "occupancy": {
                    "theoretical": [{"share": NUMBER}],
                    "estimate": [{"percent": NUMBER, "known_zero": TRUTH}],
                    "residency": {"sm_share": _SPREAD, "warps_share": _SPREAD},
                },
            },
        },
        _check_forks,
    ),
    "pareto": _Kind(
        {"cell": _NETWORK, "protocol": {"data": TEXT}},
        {
            "host_us": _TIMES,
            "device_us": _TIMES,
            "paired": Roles({}, {"bare": {"mean_host_ratio": POSITIVE}}),
            "measured": {"samples": COUNT, "accuracy": NUMBER, "mean_host_us": POSITIVE},
        },
    ),
    "pipeline": _Kind(
        {"cell": _NETWORK, "protocol": {**_TIMED, "devices": COUNT, "processes": COUNT, "cut": TEXT}},
        {
            "measured": {
                "images_s": {**dict.fromkeys(("median", "p20", "p80"), POSITIVE), "captures": [POSITIVE]},
                "split_size": Maybe(COUNT, absent=False),
                "bound_images_s": Maybe(POSITIVE, null=False),
                "pieces": Maybe({"graph_ms": [NUMBER], "link_ms": [NUMBER]}, null=False),
            },
        },
    ),
    "gpus": _Kind(
        {"cell": _NETWORK, "protocol": {**_TIMED, "cut": TEXT}},
        {"measured": {"span_us": POSITIVE, "computes": _INTERVALS, "exchanges": _INTERVALS}},
    ),
    "doctor": _Kind(
        {"cell": {"target": TEXT}},
        {
            "protocol": {"requests": COUNT, "cut_by": TEXT, "stacks": TRUTH},
            "measured": {
                "achieved_us": POSITIVE,
                **dict.fromkeys(("profiled", "is_split"), TRUTH),
                **dict.fromkeys(("span_us", "trunk_us", "side_us"), NUMBER),
                **dict.fromkeys(("possible_us", "launch_bound_us", "overlapped_us"), NUMBER),
                "findings": [_FINDING],
                "streams": [{"device": WHOLE, "stream": WHOLE, "priority": _NULL_OR_NUMBER, "work": [_STRETCH]}],
                "calls": [_STRETCH],
            },
        },
    ),
    "profile": _Kind(
        {"cell": _NETWORK},
        {
            "protocol": {"requests": COUNT, "samples_by_exit": OBJECT},
            "host_us": _TIMES,
            "paired": Roles({}, {"before": {}}),
            "measured": {
                "call_us": _TIMES,
                **dict.fromkeys(("launches", "graph_launches", "kernels", "copies", "memsets"), NUMBER),
                **dict.fromkeys(("kernel_us", "busy_us", "allocations", "waits"), NUMBER),
                "api": [{"name": TEXT, "calls": NUMBER, "host_us": NUMBER}],
            },
        },
    ),
}


_check_all = checker(_RECORD)
_CHECKS = {name: (checker(kind.always), checker(kind.measured), kind.more) for name, kind in _KINDS.items()}


def check_record(values: Mapping[str, Any]) -> None:
    """Check a record as JSON holds it; of kinds that nothing reads, only what every record has.

    Raises:
        ValueError: names the field, what it got and what it wants.
    """
    _check_all(values)
    if values["kind"] in _CHECKS:
        check_always, check_measured, check_more = _CHECKS[values["kind"]]
        failed = values.get("error") is not None
        check_always(values)
        if not failed:
            check_measured(values)
        check_more(values, failed)
