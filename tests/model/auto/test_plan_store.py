"""Plans on disk: where they are, that they come back as they were, and what happens to files that are none."""

import dataclasses
import json
import multiprocessing
import threading
import warnings
from pathlib import Path

import pytest
from auxhead.model.auto.candidates import Candidate
from auxhead.model.auto.plan import CandidateTimes, Plan
from auxhead.model.auto.plan_store import plans_directory, remember_plan, remembered_plan
from auxhead.model.spread import Spread

KEY = {"gpu": "H200", "batch": 8, "smaller": [], "exits": {"of_samples": [0.5, 0.5]}}
TIMES = CandidateTimes(Spread(100.0, 99.5, 101.0), Spread(90.0, 89.0, 91.0))
PLAN = Plan(
    chosen=Candidate("overlapped", ("layer1", "layer3")),
    plain="overlapped (1 fork)",
    times={"serial": TIMES, "overlapped (1 fork)": TIMES, "overlapped (2 forks)": TIMES},
    left_out={"gated": "no conditional nodes"},
    shares=(0.25, 0.75),
    utc="2026-01-02T03:04:05+00:00",
)


@pytest.fixture
def path() -> Path:
    """Where the plan of KEY was kept."""
    remember_plan(KEY, PLAN)
    (path,) = plans_directory().iterdir()
    return path


@pytest.mark.parametrize(
    "chosen", [PLAN.chosen, Candidate("overlapped"), Candidate("polled", compact=True), Candidate("gated", lag=1)]
)
def test_a_plan_comes_back_as_it_was(chosen: Candidate) -> None:
    plan = dataclasses.replace(PLAN, chosen=chosen, times={**PLAN.times, chosen.name: TIMES})
    assert remembered_plan(KEY) is None
    remember_plan(KEY, plan)
    assert remembered_plan(KEY) == dataclasses.replace(plan, remembered=True)
    assert remembered_plan({**KEY, "batch": 9}) is None
    assert remembered_plan({**KEY, "smaller": ()}) is not None, "a tuple is a list in JSON"


def test_where_plans_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("AUXHEAD_CACHE", str(tmp_path / "own"))
    assert plans_directory() == tmp_path / "own" / "plans"
    monkeypatch.delenv("AUXHEAD_CACHE")
    assert plans_directory() == tmp_path / "xdg" / "auxhead" / "plans"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert plans_directory() == tmp_path / "home" / ".cache" / "auxhead" / "plans"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert plans_directory() == tmp_path / "home" / ".cache" / "auxhead" / "plans"


def changed(name: str, value: object) -> str:
    content = {"format": 1, "key": KEY, "plan": PLAN.as_json()}
    place, _, field = name.rpartition(".")
    (content["plan"] if place else content)[field] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        "\0" * 100,
        changed("format", 2),
        changed("key", {**KEY, "batch": 9}),
        changed("plan", None),
        changed("plan.times", {}),
        changed("plan.times", {"serial": {"host_us": {"median": 1.0}}}),
        changed("plan.plain", "polled"),
        changed("plan.chosen", {"exits": "sometimes", "forks": [], "lag": 0, "compact": False}),
        changed("plan.chosen", {"exits": "gated", "forks": [], "lag": 2, "compact": False}),
        changed("plan.chosen", {"exits": "overlapped", "forks": 1}),
        changed("plan.chosen", {"exits": "overlapped", "forks": [], "speed": 1}),
        changed("plan.chosen", {"exits": "polled", "forks": [], "lag": 0, "compact": False}),
        changed("plan.shares", [None]),
        changed("plan.left_out", []),
    ],
    ids=range(19),
)
def test_what_is_no_plan_is_told_of_and_written_over(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.warns(UserWarning, match=f"{path.name} holds no plan .*; measuring anew"):
        assert remembered_plan(KEY) is None
    remember_plan(KEY, PLAN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert remembered_plan(KEY) is not None


@pytest.mark.parametrize("end", range(0, 1200, 100))
def test_half_a_file_is_no_plan(path: Path, end: int) -> None:
    assert end < len(path.read_bytes())
    path.write_bytes(path.read_bytes()[:end])
    with pytest.warns(UserWarning, match="holds no plan"):
        assert remembered_plan(KEY) is None


def test_where_nothing_can_be_written_a_warning_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUXHEAD_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="the plan is not remembered"):
        remember_plan(KEY, PLAN)
    with pytest.warns(UserWarning, match="holds no plan"):
        assert remembered_plan(KEY) is None


def write_often(number: int) -> None:
    for _ in range(50):
        remember_plan(KEY, dataclasses.replace(PLAN, utc=f"{number}" * 2000))


def assert_plans_are_whole_while(writers: list[threading.Thread] | list[multiprocessing.Process]) -> None:
    remember_plan(KEY, PLAN)
    for writer in writers:
        writer.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while any(writer.is_alive() for writer in writers):
            plan = remembered_plan(KEY)
            assert plan is not None and (len(set(plan.utc)) == 1 or plan.utc == PLAN.utc)
    for writer in writers:
        writer.join()
    assert len(list(plans_directory().iterdir())) == 1, "nothing unfinished is left"
    assert remembered_plan(KEY).utc in ("1" * 2000, "2" * 2000)


def test_two_threads_that_write_and_one_that_reads() -> None:
    assert_plans_are_whole_while([threading.Thread(target=write_often, args=(number,)) for number in (1, 2)])


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="a new process takes seconds")
def test_two_processes_that_write_and_one_that_reads() -> None:
    fork = multiprocessing.get_context("fork")
    assert_plans_are_whole_while([fork.Process(target=write_often, args=(number,)) for number in (1, 2)])
