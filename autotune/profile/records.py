"""Records of ``auxhead-tune profile``: one of requests before, one of requests after."""

import secrets
from typing import Any

from ..measuring.cells import OWN, Cell
from ..measuring.cuda_calls import ALLOCATIONS, GRAPH_LAUNCHES, LAUNCHES, SYNCHRONISATIONS
from ..measuring.profiled_requests import WARM_UP, RequestProfile
from ..measuring.timers import PROTOCOL
from ..records.record import Record
from ..records.spread import spread
from ..records.summaries import network_record, summary
from .measure import AFTER, BEFORE, BeforeAndAfter

#: The kind of these records.
KIND = "profile"
#: The variant before, by its name in the benchmark.
NAIVE = "eager-naive-item@as_is"


def profile_records(found: BeforeAndAfter, cell: Cell, runner: str, environment: dict[str, Any]) -> list[Record]:
    """Return two records of one run: of naive early exit, and of ``runner`` (kind of runner, "@", kind of trunk)."""
    run = secrets.token_hex(6)
    answers = {name: summary(times.host) for name, times in found.times.items()}
    before = {"role": BEFORE, "variant": NAIVE, "host_us": answers[BEFORE]["median"]}
    before["host_ratio"] = answers[AFTER]["median"] / answers[BEFORE]["median"]
    return [
        network_record(
            KIND,
            cell.as_json(),
            variant,
            environment,
            exits=OWN,
            run=run,
            protocol={
                "requests": found.profiles[name].requests,
                "warm_up": WARM_UP,
                **PROTOCOL,
                "order": f"{PROTOCOL['order']}, without a profiler; then one after the other under it",
                "samples_by_exit": found.samples_by_exit,
            },
            host_us=answers[name],
            paired=[before] if name == AFTER else [],
            measured={"call_us": spread(found.times[name].call[0])._asdict(), **_of_profile(found.profiles[name])},
            correctness=found.counts[name],
            notes=found.problems if name == AFTER else [],
        )
        for name, variant in ((BEFORE, NAIVE), (AFTER, runner))
    ]


def _of_profile(profile: RequestProfile) -> dict[str, Any]:
    return {
        "launches": sum(profile.calls_by_request(LAUNCHES)) / profile.requests,
        "graph_launches": sum(profile.calls_by_request(GRAPH_LAUNCHES)) / profile.requests,
        "kernels": profile.kernels,
        "copies": profile.copies,
        "memsets": profile.fills,
        "kernel_us": profile.kernel_us,
        "busy_us": profile.busy_us,
        "api": [{"name": row.name, "calls": row.calls, "host_us": row.host_us} for row in profile.api],
        "allocations": sum(profile.calls_by_request(ALLOCATIONS)),
        "waits": sum(profile.calls_by_request(SYNCHRONISATIONS)),
    }
