"""Forms of records: what every one holds, and field by field those of sweeps, which decide launches, and the doctor's.

The doctor's are made of other tools' traces. Of the other kinds tables and figures say, by ``made_of``, that nothing
can be made of a file.
"""

from collections.abc import Mapping
from typing import Any

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
    Value,
    checker,
    one_of,
    row,
)

#: Fields of a HeadShape, in its order; this and what follows is written out since what knows it imports torch.
SHAPE = ("samples", "channels", "height", "width", "grid_h", "grid_w", "layout", "pool", "classes", "dtype")
#: Fields of the shape that are words; the others are sizes.
WORDS = {
    "layout": ("channels_last", "contiguous", "strided"),
    "pool": ("avg", "max"),
    "dtype": ("float16", "bfloat16", "float32"),
}

_PLAIN = Value("text, a number or null", lambda value: value is None or isinstance(value, (str, int, float)))
#: Every record; see :class:`~auxhead.autotune.records.record.Record`.
_RECORD: dict[str, Form] = {
    **dict.fromkeys(("kind", "exits", "variant", "run", "utc"), TEXT),
    **dict.fromkeys(("cell", "protocol"), OBJECT),
    "environment": dict.fromkeys(
        ("gpu", "sm_count", "capability", "driver", "torch", "triton", "cudnn", "cuda"), Maybe(_PLAIN)
    ),
    **dict.fromkeys(("host_us", "device_us", "measured", "correctness"), Maybe(OBJECT)),
    **dict.fromkeys(("paired", "notes"), Maybe(LIST, null=False)),
    "error": Maybe(TEXT),
}
_STRETCH = row("[begin, end, role]", 2, texts=1)
_SPREAD = Maybe(row("[least, most]", 2))
_NULL_OR_NUMBER = Maybe(NUMBER, absent=False)
_FINDING = {
    **dict.fromkeys(("kind", "what", "remedy", "snippet"), TEXT),
    **dict.fromkeys(("evidence", "lines"), [TEXT]),
    "cost_us": _NULL_OR_NUMBER,
    "spread_us": _SPREAD,
    "marks": [{"start_us": NUMBER, "end_us": NUMBER, "stream": Maybe(WHOLE, absent=False)}],
}
#: By kind, what failures have, too, and what there is where something was measured.
_KINDS: dict[str, tuple[Form, Form]] = {
    "sweep": (
        {
            "cell": {name: one_of(*WORDS[name]) if name in WORDS else COUNT for name in SHAPE},
            "protocol": {"rounds": COUNT, "captures": COUNT, "place": TEXT, "kernel": TEXT},
        },
        {
            "device_us": {"median": POSITIVE, "samples": SAMPLES},
            "paired": [{"role": one_of("rule"), "variant": TEXT, "samples": SAMPLES}],
        },
    ),
    "doctor": (
        {"cell": {"target": TEXT}},
        {
            "protocol": {"requests": COUNT, "cut_by": TEXT, "stacks": TRUTH},
            "measured": {
                "achieved_us": POSITIVE,
                **dict.fromkeys(("profiled", "is_split"), TRUTH),
                **dict.fromkeys(("span_us", "trunk_us", "side_us"), NUMBER),
                **dict.fromkeys(("possible_us", "launch_bound_us", "overlapped_us"), NUMBER),
                "spread": Maybe(dict.fromkeys(("achieved_us", "trunk_us", "side_us", "busy_us"), _SPREAD), null=False),
                "findings": [_FINDING],
                "not_looked_for": Maybe([TEXT], null=False),
                "streams": [{"device": WHOLE, "stream": WHOLE, "priority": _NULL_OR_NUMBER, "work": [_STRETCH]}],
                "calls": [_STRETCH],
            },
        },
    ),
}
_check_all = checker(_RECORD)
_CHECKS = {kind: tuple(map(checker, forms)) for kind, forms in _KINDS.items()}


def check_record(values: Mapping[str, Any]) -> None:
    """Check a record as JSON holds it.

    Raises:
        ValueError: names the field, what it got and what it wants.
    """
    _check_all(values)
    kind, failed = values["kind"], values.get("error") is not None
    for check in _CHECKS.get(kind, ())[: 1 if failed else 2]:
        check(values)
    if kind == "sweep":
        samples = [] if failed else [one["samples"] for one in (values["device_us"], *values["paired"])]
        if samples and (len(samples) != 2 or len({len(one[0]) for one in samples}) > 1):
            rounds = [len(one[0]) for one in samples]
            raise ValueError(f"paired: got rounds {rounds}, wants the rule's alone, of as many as the record's own")
