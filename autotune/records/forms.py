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
    Wanted,
    check,
    check_by,
    checker,
    one_of,
)

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

_PLAIN = Wanted("text, a number or null", lambda value: value is None or isinstance(value, (str, int, float)))
_FLAG = Wanted("true or false", lambda value: isinstance(value, bool))
_TIMES = {"median": POSITIVE, "p20": NUMBER, "p80": NUMBER}
_SPREAD = {"median": NUMBER, "p20": NUMBER, "p80": NUMBER}
_INTERVAL = {"device_ratio": POSITIVE, "low": POSITIVE, "high": POSITIVE}
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


_IN_NETWORK = checker({"cell": {"model": TEXT, "tap": TEXT}})


def _check_one_pair(values: Mapping[str, Any], role: str) -> None:
    """Check that records of which a pair is read as the only one hold no other."""
    pairs = values.get("paired", [])
    if len(pairs) > 1 or any(not isinstance(pair, dict) or pair.get("role") != role for pair in pairs):
        raise ValueError(f"paired: got {pairs!r:.60}, wants a pair of role {role!r} alone")


def _more_of_sweep(values: Mapping[str, Any], failed: bool) -> None:
    _check_one_pair(values, "rule")
    if values["protocol"]["place"] == "network":
        check_by(_IN_NETWORK, values)
    if not failed:
        (rule,) = (pair for pair in values["paired"] if pair["role"] == "rule")
        rounds, wanted = (len(one["samples"][0]) for one in (values["device_us"], rule))
        if rounds != wanted:
            raise ValueError(f"device_us.samples: got {rounds} rounds, wants {wanted}, those of the rule's")


def _more_of_heads(values: Mapping[str, Any], failed: bool) -> None:
    _check_one_pair(values, "fused")
    if values["variant"] == "bytes" and not failed:
        check(values, {"protocol": {"bytes": COUNT, "bytes_per_second": POSITIVE}})


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
_PROGRAM = Wanted(
    "[launch, SM, start, end]",
    lambda one: isinstance(one, list) and len(one) == 4 and all(map(NUMBER.fits, one)),
)

_INTERVALS = [
    [Wanted("[begin, end]", lambda one: isinstance(one, list) and len(one) == 2 and all(map(NUMBER.fits, one)))]
]
#: Of a timeline.
_STRETCH = Wanted(
    "[begin, end, role]",
    lambda one: isinstance(one, list) and len(one) == 3 and all(map(NUMBER.fits, one[:2])) and isinstance(one[2], str),
)

_KINDS = {
    "sweep": _Kind(
        {
            "cell": _SHAPE,
            "protocol": {
                "place": one_of(*PLACES),
                "kernel": TEXT,
                **_TIMED,
                "trunk": Maybe(TEXT),
                "forks": Maybe([TEXT]),
            },
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
            "paired": Roles({"trunk": {"device_us": _TIMES, **_INTERVAL}, "heads": {"device_us": _TIMES}}),
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
                "coverage": Maybe(NUMBER, absent=False),
                "kernels": [_KERNEL],
                "programs": [_PROGRAM],
            },
        },
        _more_of_timeline,
    ),
    "footprint": _Kind(
        {"cell": _NETWORK},
        {
            "variant": Wanted(
                f"a name with one of: {', '.join(FOOTPRINTS)}", lambda name: any(one in name for one in FOOTPRINTS)
            ),
            "protocol": {**_TIMED, "forks": [TEXT]},
            "device_us": _TIMES,
            "paired": Roles(
                {"trunk": {"device_us": _TIMES, **_INTERVAL}, "heads": {"device_us": _TIMES}},
                {"recorded": {"device_us": _TIMES}},
            ),
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
            "protocol": {"requests": COUNT, "cut_by": TEXT, "stacks": _FLAG},
            "measured": {
                "achieved_us": POSITIVE,
                **dict.fromkeys(("profiled", "is_split"), _FLAG),
                **dict.fromkeys(
                    ("span_us", "trunk_us", "side_us", "possible_us", "launch_bound_us", "overlapped_us"), NUMBER
                ),
                "findings": [
                    {
                        **dict.fromkeys(("kind", "what", "remedy", "snippet"), TEXT),
                        **dict.fromkeys(("evidence", "lines"), [TEXT]),
                        "cost_us": Maybe(NUMBER, absent=False),
                        "marks": [
                            {**dict.fromkeys(("start_us", "end_us"), NUMBER), "stream": Maybe(WHOLE, absent=False)}
                        ],
                    }
                ],
                "streams": [
                    {
                        **dict.fromkeys(("device", "stream"), WHOLE),
                        "priority": Maybe(NUMBER, absent=False),
                        "work": [_STRETCH],
                    }
                ],
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


def _both(one: Any, other: Any) -> Form:
    """Return the form of a value that two forms ask for; fields of the second one go before."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return other
    common = {name: _both(one[name], other[name]) for name in one.keys() & other.keys()}
    return {**one, **other, **common}


_CHECK_RECORD = checker(_RECORD)
_CHECK_FAILED = {name: checker(kind.always) for name, kind in _KINDS.items()}
_CHECK_MEASURED = {name: checker(_both(kind.always, kind.measured)) for name, kind in _KINDS.items()}


def check_record(values: Mapping[str, Any]) -> None:
    """Check a record as JSON holds it; of kinds that nothing reads, only what every record has.

    Raises:
        ValueError: names the field, what it got and what it wants.
    """
    check_by(_CHECK_RECORD, values)
    kind, failed = values["kind"], values.get("error") is not None
    if kind in _KINDS:
        check_by(_CHECK_FAILED[kind] if failed else _CHECK_MEASURED[kind], values)
        _KINDS[kind].more(values, failed)
