"""Plan files whose bytes or JSON are damaged: used, or told of in one line; what is used can be described."""

import json
import math
import random
import warnings
from pathlib import Path

import pytest
from auxhead.model.auto.candidates import Candidate
from auxhead.model.auto.pass_times import PassTimes
from auxhead.model.auto.plan import Plan, PlanFile
from support.damaged import assert_short, damaged_bytes, damaged_json, make_unreadable

CONDITIONS = {"GPU": "H200", "batch sizes": [8], "exit shares": {"8": [[0.5, 0.5], [0.5, 0.5]]}}
TIMES = PassTimes([100.0, 99.5], [90.0, 89.0])
PLAN = Plan(
    chosen=Candidate("overlapped", ("layer1", "layer3")),
    plain="overlapped (1 fork)",
    times={"serial": TIMES, "overlapped (1 fork)": TIMES, "overlapped (2 forks)": TIMES},
    trunk_times={"as_is": TIMES, "cudnn": TIMES},
    left_out={"gated": "no conditional nodes"},
    shares=(0.25, 0.75),
    utc="2026-01-02T03:04:05+00:00",
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    PlanFile(path, CONDITIONS).write({8: PLAN})
    return path


def read(path: Path) -> tuple[dict[int, Plan], bool]:
    """The plans, and whether a damaged file was told of."""
    file = PlanFile(path, CONDITIONS)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plans = file.read()
    assert len(told) <= 1 and not (told and plans)
    for one in told:
        assert_short(str(one.message), path, "measuring anew")
    return plans, bool(told)


def test_any_damage(path: Path) -> None:
    whole = path.read_bytes()
    told = used = 0
    for seed in range(600):
        dice = random.Random(seed)
        path.write_bytes(damaged_bytes(whole, dice) if seed % 3 else damaged_json(json.loads(whole), dice))
        plans, of_damage = read(path)
        told, used = told + of_damage, used + bool(plans)
        for plan in plans.values():
            assert plan.describe()
            times = [us for passes in plan.times.values() for us in (*passes.host, *passes.device)]
            assert all(math.isfinite(us) and us > 0 for us in times) and all(0 <= one <= 1 for one in plan.shares)
            assert isinstance(plan.chosen.compact, bool) and all(isinstance(fork, str) for fork in plan.chosen.forks)
    assert told > 300 and used > 20


@pytest.mark.parametrize("kind", ["pipe", "endless-link", "device"])
def test_no_file_in_its_place(path: Path, kind: str) -> None:
    make_unreadable(path, kind)
    assert read(path) == ({}, True)
