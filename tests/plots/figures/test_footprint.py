"""Figure of overlap against occupancy, and its words on where overlap stops being free."""

import pytest
from auxhead.autotune.records.record import read_records
from auxhead.plots.figures.footprint import boundary
from auxhead.plots.figures.registry import FIGURES
from auxhead.plots.records import COMMITTED, NoRecords
from support.footprint_records import failed_record, records

FOOTPRINT = FIGURES["footprint"]


def points(*pairs, kind="programs"):
    """Points of occupancy and what they surely add, percent."""
    return [{"kind": kind, "occupancy_percent": at, "added_low": added} for at, added in pairs]


def test_the_boundary_is_between_what_is_free_and_what_is_not():
    found = boundary(points((4.0, 6.0), (0.5, 1.0), (1.0, -1.0), (16.0, 9.0)))
    assert found == {"occupancy_percent": 2.0, "footprints": 4, "on_the_wrong_side": 0}


@pytest.mark.parametrize("kind", ["priority", "SMs"])
def test_one_footprint_may_disagree_and_others_do_not_count(kind):
    usual = points((0.1, 0.5), (0.2, 3.0), (0.4, 0.5), (0.8, 1.0), (5.0, 4.0), (6.0, 5.0))
    found = boundary(usual + points((0.1, 50.0), (0.2, 50.0), kind=kind))
    assert found == {"occupancy_percent": pytest.approx(2.0), "footprints": 6, "on_the_wrong_side": 1}


@pytest.mark.parametrize(
    "pairs",
    [
        ((1.0, 0.0), (2.0, 1.0)),
        ((1.0, 3.0), (2.0, 4.0)),
        ((1.0, 3.0), (2.0, 1.0), (3.0, 3.0), (4.0, 1.0)),
        ((1.0, 3.0), *((at, 1.0) for at in range(2, 10)), (10.0, 3.0), (11.0, 1.0), (12.0, 1.0)),
    ],
    ids=["all free", "none free", "occupancy does not tell", "two are not free"],
)
def test_no_boundary(pairs):
    assert boundary(points(*pairs)) is None


def test_a_boundary_is_better_than_none():
    """Where most footprints are free, a line with as many on the wrong side as there are others tells nothing."""
    free = [(float(at), 1.0) for at in range(1, 10)]
    assert boundary(points(*free, (0.5, 3.0), (20.0, 3.0)))["on_the_wrong_side"] == 1, "two without the line"
    assert boundary(points(*free, (5.5, 3.0))) is None


@pytest.mark.parametrize(
    ("added", "says"),
    [
        (
            lambda share: 1.0 if share < 0.001 else 8.0,
            "heads add 1 % up to 0.081 % of the SMs' warps; beyond, up to 5 %",
        ),
        (lambda share: 1.0, "heads add 1 % up to 0.34 % of the SMs' warps, the most that was tried"),
        (lambda share: 8.0, "no footprint is free; they add 5 to 5 % to the trunk"),
        (lambda share: 8.0 if share < 0.0003 else 1.0, "occupancy does not tell what is free; +0.6 to +5.0 %"),
    ],
    ids=["boundary", "free", "never free", "does not tell"],
)
def test_the_title_is_what_was_found(added, says):
    figure, drawn = FOOTPRINT.draw(records(added=added))
    assert drawn["title"] == f"Batch 1: {says}" == figure.get_suptitle()


def test_footprints_of_equal_occupancy_have_a_title():
    added = iter([1.0, 8.0] + [8.0] * 20)
    kept = records(added=lambda _share: next(added))
    for one in kept:
        share = one.measured["occupancy"]["residency"]["warps_share"]
        one.measured["occupancy"]["residency"]["warps_share"] = {**share, "median": 0.01}
    assert "Batch 1: " in FOOTPRINT.numbers(kept)["title"]


def test_what_is_off_the_scale_stands_at_its_edge_with_its_number():
    figure, drawn = FOOTPRINT.draw(records(added=lambda share: 147.0 if share < 0.0003 else 1.0))
    above = figure.axes[0]
    added = [one["added_percent"] for one in drawn["batches"]["1"]["points"]]
    wanted = sorted(f"{percent:+.0f}" for percent in added if percent > 12)
    assert wanted and sorted(text.get_text() for text in above.texts) == wanted and above.get_ylim()[1] < 20


def test_only_failures_are_no_records():
    with pytest.raises(NoRecords, match="no footprint that was measured"):
        FOOTPRINT.draw([failed_record()])


def test_footprints_under_other_conditions_alone_are_too_few():
    """There is no usual one that they could be compared with."""
    with pytest.raises(NoRecords, match="no footprint at batch 1 but those under other conditions"):
        FOOTPRINT.draw(
            [one for one in read_records(COMMITTED / "h200/footprint.jsonl") if one.variant.endswith("same priority")]
        )
