"""``auxhead-tune doctor diff``: what is slower, faster, new and gone; noise, the gate and its status; bad files."""

import copy
import dataclasses
import json
import random
import re

import pytest
from auxhead.autotune.doctor.diagnosis import find_all, spread_of_times, with_spreads
from auxhead.autotune.doctor.trace import Watched
from auxhead.autotune.records.record import append_record, read_records
from auxhead.plots.records import COMMITTED
from support.command_line import assert_one_line_error, tune
from support.committed_records import records
from support.damaged import damaged_json
from support.doctor_requests import of_requests, run, trace_of
from support.example_traces import Program, written

COMMITTED_FILE = COMMITTED / "h200/doctor.jsonl"


def finding(kind, cost_us, *lines, spread=None):
    words = dict.fromkeys(("what", "remedy", "snippet"), "")
    lists = {"evidence": [], "lines": [*lines], "marks": []}
    return {"kind": kind, **words, **lists, "cost_us": cost_us, "spread_us": spread}


def diagnosis(request=1000.0, device=600.0, findings=(), target="net:factory", spread=10.0, **more):
    """A record in which every time lies between itself and so much more."""
    record = copy.deepcopy(records("h200/doctor.jsonl")[0])
    measured = record.measured | {
        **{"achieved_us": request, "trunk_us": device, "side_us": 0.0, "overlapped_us": 0.0, "is_split": False},
        "spread": {"achieved_us": [request, request + spread], "busy_us": [device, device + spread]},
        "findings": [*findings],
        **more,
    }
    return dataclasses.replace(record, cell={"target": target}, measured=measured)


@pytest.fixture
def diff(tmp_path):
    """Compares lists of records as the command does, with options; of each the last one counts."""

    def compare(before, now, *options):
        files = [tmp_path / "before.jsonl", tmp_path / "now.jsonl"]
        for file, kept in zip(files, (before, now), strict=True):
            file.unlink(missing_ok=True)
            for one in kept if isinstance(kept, list) else [kept]:
                append_record(file, one)
        return tune("doctor", "diff", *files, *options)

    return compare


def rows(result):
    """The table's rows, by part: what stands behind each."""
    row = r"^ (.+?)  +([\d.,]+|-)  +([\d.,]+|-)  +([+-][\d.]+ %|-)  +(\w[\w ]+?) *$"
    return {name: tuple(rest) for name, *rest in re.findall(row, result.output, flags=re.MULTILINE)}


def test_a_record_against_itself_is_as_before(tmp_path):
    result = tune("doctor", "diff", COMMITTED_FILE, COMMITTED_FILE, "--gate", "5%")
    assert result.exit_code == 0 and result.output.startswith("Within the gate of 5%.\n"), result.output
    assert all(len(line) <= 80 for line in result.output.splitlines())
    last = read_records(COMMITTED_FILE)[-1]
    found = rows(result)
    assert [*found][:4] == ["request", "device", "trunk (t1)", "the rest (t2)"]
    assert [*found][4:] == [one["kind"] for one in last.measured["findings"]]
    assert {row[-1] for row in found.values()} == {"as before"}
    request_us = f"{last.measured['achieved_us']:,.1f}"
    assert found["request"] == (request_us, request_us, "+0.0 %", "as before")
    assert "kept no spread" in " ".join(result.output.split())


def test_two_steps_of_the_guide_are_compared_once_they_are_of_one_target(diff):
    steps = {one.cell["target"].partition(":")[2]: one for one in records("h200/doctor.jsonl")}
    in_line = steps["in_line"]
    graph = dataclasses.replace(steps["one_launch"], cell=in_line.cell)
    result = diff(in_line, graph)
    assert result.exit_code == 0 and result.output.startswith("Faster: request (-70.7 %), device (-"), result.output
    assert "gone: launch-bound, fusible-heads." in result.output.splitlines()[0]
    result = diff(graph, in_line, "--gate", "5%")
    first = result.output.splitlines()[0]
    assert result.exit_code == 1 and first.startswith(
        "Over the gate; slower by more than 5%: request (+241.3 %), device"
    )
    assert first.endswith("new: launch-bound, fusible-heads.")
    assert rows(result)["launch-bound"][0] == "-"


def test_what_is_within_the_spread_is_as_before(diff):
    before = diagnosis(findings=[finding("host-wait", 100.0, "net.py:7", spread=[90.0, 130.0])], spread=100.0)
    now = diagnosis(1090.0, 690.0, [finding("host-wait", 128.0, "net.py:9", spread=[120.0, 140.0])])
    result = diff(before, now, "--gate", "0%")
    assert result.exit_code == 0, result.output
    assert {row[-1] for row in rows(result).values()} == {"as before"}
    assert diff(before, now).output.startswith("As before.\n")


@pytest.mark.parametrize(
    "now, gate, over",
    [
        (diagnosis(1060.0), "5%", "slower by more than 5%: request (+6.0 %)"),
        (diagnosis(1060.0), "6.5%", ""),
        (diagnosis(940.0), "5%", ""),
        (diagnosis(device=640.0), "5 %", "slower by more than 5 %: device (+6.7 %)"),
    ],
)
def test_the_gate_holds_for_the_request_and_the_device(diff, now, gate, over):
    result = diff(diagnosis(), now, "--gate", gate)
    assert result.exit_code == bool(over), result.output
    assert result.output.splitlines()[0] == (f"Over the gate; {over}." if over else f"Within the gate of {gate}.")


def test_the_trunk_and_the_rest_are_shown_and_not_gated(diff):
    before, now = (diagnosis(is_split=True, side_us=us, overlapped_us=us) for us in (100.0, 150.0))
    result = diff(before, now, "--gate", "5%")
    assert result.exit_code == 0 and result.output.startswith("Within the gate of 5%.\n")
    assert rows(result)["the rest (t2)"] == ("100.0", "150.0", "+50.0 %", "slower")
    assert rows(diff(diagnosis(), now))["device"][-1] == "as before" and "the rest (t2)" not in rows(
        diff(diagnosis(), now)
    )


def test_findings_count_against_the_request(diff):
    def waiting(cost_us):
        return diagnosis(findings=[finding("host-wait", cost_us, "a/net.py:7", spread=[cost_us, cost_us])])

    assert diff(waiting(10.0), waiting(50.0), "--gate", "5%").exit_code == 0, "40 us of 1,000"
    result = diff(waiting(10.0), waiting(70.0), "--gate", "5%")
    assert result.exit_code == 1 and "slower by more than 5%: host-wait, net.py (+6.0 %)." in result.output
    assert rows(result)["host-wait, net.py"] == ("10.0", "70.0", "+6.0 %", "slower")


def test_a_cost_where_none_could_be_told_counts_from_nothing(diff):
    def waiting(cost_us):
        return diagnosis(findings=[finding("host-wait", cost_us, "a/net.py:7")])

    assert diff(waiting(None), waiting(400.0), "--gate", "5%").exit_code == 1
    assert diff(waiting(400.0), waiting(None), "--gate", "5%").exit_code == 0


def test_findings_are_told_by_kind_and_file_and_counted(diff):
    waits = [finding("host-wait", cost, f"/home/me/net.py:{line}") for cost, line in ((90.0, 12), (20.0, 30))]
    other, race = finding("host-wait", 50.0, "other.py:3 in forward"), finding("race", None, "net.py:5")
    moved = [finding("host-wait", 90.0, "/ci/net.py:14")]
    result = diff(diagnosis(findings=[race, *waits]), diagnosis(findings=[race, *moved, other]), "--gate", "5%")
    assert result.exit_code == 1 and result.output.startswith("Over the gate; new: host-wait, other.py.\n")
    parts = [line.split() for line in result.output.splitlines() if line.startswith((" host-wait", " race"))]
    assert [(part[1], part[-1]) for part in parts] == [
        *(("net.py", "before"), ("net.py", "before"), ("net.py", "gone"), ("other.py", "new"))
    ]


def test_json_has_all_parts_and_what_is_over(diff):
    result = diff(diagnosis(), diagnosis(1200.0, findings=[finding("jitter", 90.0)]), "--gate", "10%", "--json")
    found = json.loads(result.output)
    assert result.exit_code == 1 and found["over"] == ["request", "jitter"] and found["gate"] == pytest.approx(0.1)
    assert [part["said"] for part in found["parts"]] == ["slower", "as before", "new"]


def test_the_last_diagnoses_of_the_target_are_compared(diff):
    before = [diagnosis(500.0), diagnosis(1000.0), diagnosis(7.0, target="net:other")]
    assert rows(diff(before, [diagnosis(1.0), diagnosis(1000.0)]))["request"][:2] == ("1,000.0", "1,000.0")


def test_what_cannot_be_compared_is_refused_with_both_names(diff, tmp_path):
    elsewhere = diagnosis()
    elsewhere = dataclasses.replace(elsewhere, environment={**elsewhere.environment, "gpu": "NVIDIA H100"})
    for now, message in (
        (diagnosis(target="net:other"), "before.jsonl is of net:factory, "),
        (diagnosis(target="net:other"), "now.jsonl of net:other: wants diagnoses of one target"),
        (elsewhere, "before.jsonl is of NVIDIA H200, "),
        (elsewhere, "now.jsonl of NVIDIA H100: wants diagnoses of one GPU"),
        (diagnosis(profiled=True), "of requests under the profiler: wants diagnoses of one way of timing"),
        (records("h200/zoo.jsonl")[0], "now.jsonl: holds no diagnosis, wants a doctor.jsonl that"),
    ):
        assert_one_line_error(diff(diagnosis(), now, "--gate", "5%"), message)
    file = tmp_path / "before.jsonl"
    for words, message in (
        ([file], "TARGET: got diff and 1 files, wants diff BASELINE.jsonl NOW.jsonl"),
        ([file, tmp_path / "nosuch.jsonl"], "nosuch.jsonl: no such file"),
        ([file, file, "--gate", "0.05"], "--gate: got '0.05', wants a percentage, such as 5%"),
        ([file, file, "--gate", "-5%"], "--gate: got '-5%', wants a percentage, such as 5%"),
        ([file, file, "--out", tmp_path], "--out: got "),
    ):
        assert_one_line_error(tune("doctor", "diff", *words), message)
    assert_one_line_error(
        tune("doctor", "net:factory", "--gate", "5%"), "--gate: is of diff, and TARGET is net:factory"
    )


def test_a_damaged_record_is_compared_or_refused_in_one_line(tmp_path):
    found = [finding("host-wait", 90.0, "net.py:12", spread=[80.0, 95.0]), finding("race", None)]
    one = dataclasses.asdict(diagnosis(findings=found, streams=[], calls=[]))
    del one["place"]
    whole, damaged = tmp_path / "whole.jsonl", tmp_path / "damaged.jsonl"
    whole.write_text(json.dumps(one) + "\n")
    refused = 0
    for seed in range(30):
        damaged.write_bytes(damaged_json(one, random.Random(seed)) + b"\n")
        for files in ((whole, damaged), (damaged, whole)):
            result = tune("doctor", "diff", *files, "--gate", "5%")
            if result.exit_code not in (0, 1) or result.exception and not isinstance(result.exception, SystemExit):
                assert_one_line_error(result, str(damaged))
                refused += 1
    assert 5 < refused < 55


@pytest.mark.parametrize("more", [{"not_looked_for": ["code-loading"]}, {}], ids=["said", "older"])
def test_what_was_not_looked_for_in_both_is_neither_new_nor_gone(more, tmp_path):
    of_both = [
        diagnosis(findings=[finding("code-loading", 90.0)], not_looked_for=[]),
        diagnosis(**more),
    ]
    for name, record in zip(("with", "without"), of_both, strict=True):
        append_record(tmp_path / f"{name}.jsonl", record)
    for one, other in (("with", "without"), ("without", "with")):
        done = tune("doctor", "diff", tmp_path / f"{one}.jsonl", tmp_path / f"{other}.jsonl", "--gate", "5%")
        assert done.exit_code == 0 and "neither new nor gone: code-loading." in done.output, done.output
    append_record(tmp_path / "none.jsonl", diagnosis(not_looked_for=[]))
    done = tune("doctor", "diff", tmp_path / "none.jsonl", tmp_path / "with.jsonl", "--gate", "5%")
    assert done.exit_code == 1 and "new: code-loading" in done.output


def test_traces_are_known_by_their_names_and_diagnosed_to_the_end(tmp_path):
    """From two traces of one name to the comparison of their records: the second waits once more."""
    for folder, steps in (("before", "trunk 16"), ("now", "trunk 8; item net.py(32): forward; trunk 8")):
        program = Program()
        for _ in range(3):
            with program.request():
                run(program, steps)
            program.rest()
        (tmp_path / folder).mkdir()
        trace = written(program.content(), tmp_path / folder)
        assert tune("doctor", trace, "--out", tmp_path / folder).exit_code == (folder == "now")
    files = [tmp_path / folder / "doctor.jsonl" for folder in ("before", "now")]
    result = tune("doctor", "--gate", "1%", "diff", *files)
    assert result.exit_code == 1, result.output
    first = result.output.splitlines()[0]
    assert first.startswith("Over the gate; slower by more than 1%: request (+") and first.endswith(
        "new: host-wait, net.py."
    )
    assert rows(result)["device"][2:] == ("+0.3 %", "slower"), "the copy"


# The spread that records have.


def test_times_spread_over_requests_of_the_trace_and_over_those_timed_without_a_profiler(tmp_path):
    requests = "trunk 10", "trunk 12", "trunk 11"
    spread = spread_of_times(of_requests(tmp_path, *requests))
    assert spread["trunk_us"] == spread["busy_us"] == (pytest.approx(400.0), pytest.approx(480.0))
    assert spread["side_us"] == (0.0, 0.0) and spread["achieved_us"][0] < spread["achieved_us"][1]
    watched = Watched(requests=4, host_us=50.0, samples_us=tuple(map(float, range(101))))
    assert spread_of_times(of_requests(tmp_path, *requests, watched=watched))["achieved_us"] == (20.0, 80.0)


def test_costs_spread_over_requests_in_each_of_which_the_finding_may_be(tmp_path):
    calls = "trunk 8; call cudaMalloc {}; trunk 8"
    trace = of_requests(tmp_path, calls.format(100), calls.format(140), calls.format(90))
    [found] = with_spreads(trace, find_all(trace))
    assert found.cost_us == pytest.approx(100.0)
    assert found.spread_us == (pytest.approx(90.0), pytest.approx(140.0))
    trace = of_requests(tmp_path, calls.format(100), calls.format(140), "trunk 16")
    [found] = with_spreads(trace, find_all(trace))
    assert found.spread_us == (0.0, pytest.approx(140.0))


def test_findings_of_one_kind_and_file_have_spreads_of_their_own(tmp_path):
    trace = trace_of("trunk 8; item net.py(3): f; python 40; trunk 8; item net.py(60): g; trunk 8", tmp_path)
    first, second = with_spreads(trace, find_all(trace))
    assert first.cost_us > second.cost_us + 30.0
    for one in (first, second):
        assert one.spread_us == (pytest.approx(one.cost_us), pytest.approx(one.cost_us))
