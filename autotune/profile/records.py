"""Records of ``auxhead-tune profile``: one of requests before, one of requests after."""

import secrets
from collections.abc import Sequence
from typing import Any

from ..measuring.cells import OWN, Cell
from ..measuring.profiled_requests import WARM_UP, RequestProfile
from ..measuring.timers import PROTOCOL
from ..records.record import Record, utc_now
from ..records.spread import spread
from .measure import AFTER, BEFORE, BeforeAndAfter

#: The kind of these records.
KIND = "profile"
#: The variant before, by its name in the benchmark.
NAIVE = "eager-naive-item@as_is"


def profile_records(found: BeforeAndAfter, cell: Cell, runner: str, environment: dict[str, Any]) -> list[Record]:
    """Return two records of one run: of naive early exit, and of the runner.

    Args:
        found: measurements of both.
        cell: of the network and batch.
        runner: name of the second variant: kind of runner, "@", kind of trunk.
        environment: see :class:`~auxhead.autotune.records.record.Record`.
    """
    run = secrets.token_hex(6)
    answers = {name: _summary(times.host[0]) for name, times in found.times.items()}
    before = {"role": BEFORE, "variant": NAIVE, "host_us": answers[BEFORE]["median"]}
    before["host_ratio"] = answers[AFTER]["median"] / answers[BEFORE]["median"]
    return [
        Record(
            kind=KIND,
            cell=cell.as_json(),
            exits=OWN,
            variant=variant,
            run=run,
            utc=utc_now(),
            environment=environment,
            protocol={
                "requests": found.profiles[name].requests,
                "warm_up": WARM_UP,
                **PROTOCOL,
                "order": f"{PROTOCOL['order']}, without a profiler; then one after the other under it",
                "samples_by_exit": found.samples_by_exit,
            },
            host_us={**answers[name], "captures": [answers[name]["median"]]},
            paired=[before] if name == AFTER else [],
            measured={"call_us": _summary(found.times[name].call[0]), **_of_profile(found.profiles[name])},
            correctness=found.counts[name],
            notes=found.problems if name == AFTER else [],
        )
        for name, variant in ((BEFORE, NAIVE), (AFTER, runner))
    ]


def _of_profile(profile: RequestProfile) -> dict[str, Any]:
    return {
        "launches": profile.launches,
        "graph_launches": profile.graph_launches,
        "kernels": profile.kernels,
        "copies": profile.copies,
        "memsets": profile.fills,
        "kernel_us": profile.kernel_us,
        "busy_us": profile.busy_us,
        "api": [{"name": row.name, "calls": row.calls, "host_us": row.host_us} for row in profile.api],
        "allocations": profile.allocations,
        "waits": profile.synchronisations,
    }


def _summary(us: Sequence[float]) -> dict[str, float]:
    return spread(us)._asdict()
