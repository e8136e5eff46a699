"""A plan in words: the runner chosen, by which times, and the others."""

import dataclasses

import pytest
from auxhead.model.auto.candidates import Candidate
from auxhead.model.auto.pass_times import PassTimes
from auxhead.model.auto.plan import Plan

PLAIN = "overlapped (1 fork)"
CANDIDATES = {
    "serial": Candidate("overlapped"),
    PLAIN: Candidate("overlapped", ("a",)),
    "polled": Candidate("polled"),
    "gated": Candidate("gated"),
}


def plan(chosen: str, **rest: float) -> Plan:
    """A plan measured with median host times in microseconds; on the device other runners are faster."""
    us = {PLAIN if name == "plain" else name: time for name, time in rest.items()}
    times = {
        name: PassTimes([time, 3 * time, time / 2], [1000 - time] * 3)  # the median is the time
        for name, time in us.items()
    }
    return Plan(CANDIDATES[chosen], PLAIN, times, {}, {}, (0.5, 0.5), "2026-01-02T03:04:05+00:00")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            plan(PLAIN, serial=100.0, plain=90.0, polled=1234.5),
            "overlapped (1 fork), measured 90.0 us to the answer: nothing is faster than this plain graph. "
            "The others: serial 100.0, polled 1,234.5 us.",
        ),
        (
            plan(PLAIN, plain=90.0, polled=89.9),
            "overlapped (1 fork), measured 90.0 us to the answer: this is the plain graph; polled, 89.9, is no faster "
            "beyond the noise.",
        ),
        (
            plan("polled", serial=101.0, plain=100.0, polled=75.0),
            "polled, measured 75.0 us to the answer: 25.0% less than the plain graph, overlapped (1 fork), 100.0 us. "
            "The others: serial 101.0 us.",
        ),
        (
            plan("polled", plain=100.0, polled=75.0, gated=74.9),
            "polled, measured 75.0 us to the answer: 25.0% less than the plain graph, overlapped (1 fork), 100.0 us; "
            "gated, 74.9, is no faster beyond the noise, and less simple.",
        ),
    ],
)
def test_it_says_what_was_chosen_and_why(found: Plan, said: str) -> None:
    assert found.describe() == said
    read = dataclasses.replace(found, from_file=True, left_out={"gated": "no conditional nodes."})
    assert (
        read.describe() == said.replace("measured", "measured on 2026-01-02") + " gated left out: no conditional nodes."
    )
    assert (
        found.reason() == said[said.index("measured ") + 9 : said.index(". The others")] if "others" in said else True
    )


def test_it_is_not_changed_and_read_from_no_file_unless_it_says_so() -> None:
    found = plan(PLAIN, plain=90.0)
    assert not found.from_file and not Plan.from_json(found.as_json()).from_file
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.plain = "polled"  # type: ignore[misc]
