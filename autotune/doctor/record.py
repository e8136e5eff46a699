"""The record of a diagnosis: verdict, findings, and the timeline of the request that they are shown on."""

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

from ..measuring.cuda_calls import ALLOCATIONS, LAUNCHES, SYNCHRONISATIONS
from ..records.record import Record
from ..records.summaries import network_record, summary
from .finding import Finding
from .trace import Call, Request, Trace
from .verdict import Verdict

#: The kind of these records.
KIND = "doctor"
_DIGITS = 3


def doctor_record(target: str, trace: Trace, shown: Request, findings: Sequence[Finding], verdict: Verdict) -> Record:
    """Return the record of what was found.

    Args:
        target: as the command got it.
        trace: that all is made from.
        shown: the request that the marks of the findings are of.
        findings: worst first.
        verdict: of the same trace.
    """
    return network_record(
        KIND,
        {"target": target},
        "doctor",
        _environment(trace),
        run=secrets.token_hex(6),
        host_us=summary([trace.watched.samples_us]) if trace.watched is not None and trace.watched.samples_us else None,
        protocol={"requests": len(trace.requests), "cut_by": trace.cut_by, "stacks": trace.has_stacks},
        measured={
            **dataclasses.asdict(verdict),
            "possible_us": verdict.possible_us,
            "findings": [dataclasses.asdict(one) for one in findings],
            "streams": _streams(trace, shown),
            "calls": [[round(one.start_us, _DIGITS), round(one.end_us, _DIGITS), _role(one)] for one in shown.calls],
        },
    )


def _environment(trace: Trace) -> dict[str, Any]:
    if trace.watched is not None and trace.watched.environment is not None:
        return dict(trace.watched.environment)
    device = trace.devices[0] if trace.devices else {}
    unknown = dict.fromkeys(("driver", "torch", "triton", "cudnn", "cuda"))
    return {"gpu": device.get("name"), "sm_count": device.get("numSms"), **unknown}


def _streams(trace: Trace, shown: Request) -> list[dict[str, Any]]:
    """Return the streams of a request in the order in which they begin, with what each runs."""
    priorities = {} if trace.watched is None else {one.number: one.priority for one in trace.watched.streams}
    found: dict[tuple[int, int], list[list[Any]]] = {}
    for one in shown.work:
        kind = "head" if one.is_head else one.kind
        of_stream = found.setdefault((one.device, one.stream), [])
        of_stream.append([round(one.start_us, _DIGITS), round(one.end_us, _DIGITS), kind])
    return [
        {"device": device, "stream": stream, "priority": priorities.get(stream), "work": work}
        for (device, stream), work in found.items()
    ]


def _role(call: Call) -> str:
    """Return what a call does: ``launch``, ``wait``, ``allocate`` or ``other``."""
    roles = {"launch": LAUNCHES, "wait": SYNCHRONISATIONS, "allocate": ALLOCATIONS}
    return next((role for role, names in roles.items() if call.name in names), "other")
