"""Records of the benchmark over several GPUs: one for each case, with times of stages and links, and timelines."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..records.record import Record
from ..records.summaries import as_json, network_record, summary
from .bound import bound_images_s
from .measure import Results, Timed
from .plan import CUT, PipelinePlan
from .variants import Case

#: Kinds of the records.
KIND, TIMELINE = "pipeline", "gpus"


def pipeline_records(plan: PipelinePlan, results: Results, environment: Mapping[str, Any]) -> list[Record]:
    """Return the records of all cases of one run, failures included."""
    return [_record(plan, results, case, timed, environment) for case, timed in results.cases.items()]


def timeline_records(plan: PipelinePlan, results: Results, environment: Mapping[str, Any]) -> list[Record]:
    """Return the records of the timelines of one run."""
    return [
        network_record(
            TIMELINE, plan.cell_of(case.batch).as_json(), case.name, environment, run=results.run,
            protocol=_protocol(plan, case), measured=as_json(timeline),
        )
        for case, timeline in results.timelines.items()
    ]  # fmt: skip


def _record(plan: PipelinePlan, results: Results, case: Case, timed: Timed, environment: Mapping[str, Any]) -> Record:
    fields: dict[str, Any] = {}
    if timed.error is None:
        us = [[1e6 * seconds for seconds in rounds] for rounds in timed.seconds]
        images = images_s(case.batch, timed.seconds)
        fields = {
            "host_us": as_json(summary(us)),
            "measured": as_json({"images_s": images, "batch": case.batch, **_pieces(results, case)}),
        }
    note = results.notes.get(case)
    return network_record(
        KIND, plan.cell_of(case.batch).as_json(), case.name, environment, run=results.run,
        protocol=_protocol(plan, case), correctness=timed.counts, error=timed.error, notes=[note] if note else [],
        **fields,
    )  # fmt: skip


def images_s(batch: int, seconds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return images a second of timed requests, [captures][rounds]: median, p20, p80, and the captures' medians."""
    return summary([[batch / one for one in rounds] for rounds in seconds])


def _pieces(results: Results, case: Case) -> dict[str, Any]:
    """Return a pipeline's split size, the times of its pieces and the bound; None where it is none."""
    if case.split_size is None:
        return {"split_size": None}
    times = results.times[case.split_size]
    bound = bound_images_s(case.batch, case.split_size, times)
    return {"split_size": case.split_size, "pieces": times, "bound_images_s": bound}


def _protocol(plan: PipelinePlan, case: Case) -> dict[str, Any]:
    return {
        "rounds": plan.rounds,
        "captures": plan.captures,
        "processes": plan.processes if case.together else 1,
        "devices": plan.processes,
        "cut": CUT,
        "order": "shuffled each round, an untimed request before each",
    }
