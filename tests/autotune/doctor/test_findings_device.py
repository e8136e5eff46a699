"""Findings of streams, launches and full devices, each planted, and a correct program beside it; order of all."""

import pytest
from auxhead.autotune.doctor import diagnosis
from auxhead.autotune.doctor.diagnosis import find_all, weigh
from auxhead.autotune.doctor.findings.finding import Finding, short_name
from auxhead.autotune.doctor.findings.kinds import KINDS
from auxhead.autotune.doctor.findings.occupancy import find_full_device
from auxhead.autotune.doctor.findings.requests import trunk_stream
from auxhead.autotune.doctor.trace import Noticed, Race, StreamUse, Watched, Work
from support.doctor_requests import OVERLAPPED, SIDE, TRUNK, grouped, kinds, of_requests, run, streams, trace_of


def test_heads_beside_the_trunk_on_a_stream_of_lower_priority_are_right(tmp_path):
    watched = Watched(requests=3, streams=streams())
    trace = trace_of(OVERLAPPED, tmp_path, watched=watched)
    assert kinds(trace) == []
    told = weigh(trace)
    assert told.trunk_us == pytest.approx(19 * 40.0) and told.side_us == pytest.approx(6 * 4.0)
    assert told.possible_us == told.trunk_us and told.profiled and told.achieved_us >= told.span_us
    assert told.overlapped_us > 0.0
    assert told.launch_bound_us == pytest.approx(25 * 5.0)
    assert all(sentence.endswith(".") and "us" in sentence for sentence in told.sentences())


@pytest.mark.parametrize("priorities, word", [((0, 0), "has the priority"), ((0, -1), "is higher")])
def test_a_side_stream_that_is_not_lower_in_priority_is_found(tmp_path, priorities, word):
    watched = Watched(requests=3, streams=streams(*priorities))
    [finding] = find_all(trace_of(OVERLAPPED, tmp_path, watched=watched))
    assert finding.kind == "priority" and word in finding.what and finding.cost_us is None
    assert f"trunk: stream {TRUNK}, priority {priorities[0]}" in finding.evidence[0]
    assert len(finding.marks) == 6


def test_streams_are_named_as_in_the_figure(tmp_path):
    on_default = (StreamUse(0, 0, 0, 30, TRUNK), StreamUse(0x20, 0, 0, 3, SIDE))
    race = Race("[8]", "conv writes it on the default stream", "mul reads it on stream 0x20 (priority 0)", ("a.py:1",))
    noticed = (Noticed("stream-class", "torch.cuda.Stream(stream 0x30)", ("a.py:2",)),)
    watched = Watched(requests=3, streams=on_default, races=(race,), noticed=noticed)
    evidence = {one.kind: one.evidence for one in find_all(trace_of(OVERLAPPED, tmp_path, watched=watched))}
    assert evidence["race"][0].endswith(f"with no order, mul reads it on stream {SIDE} (priority 0)")
    assert evidence["stream-class"][0] == "torch.cuda.Stream(stream 0x30)", "one that ran nothing has no number"
    assert evidence["priority"][0].startswith("trunk: the default stream, priority 0")
    assert evidence["priority"][1].startswith(f"side: stream {SIDE}, priority 0")


@pytest.mark.parametrize(
    "steps",
    [
        "copy HtoD Pinned side; trunk 20",
        "; ".join(["trunk 1; side 40"] * 10),  # equals
        f"graph {'a:7:40 ' * 10}b:21:5",
        "side 30; join; trunk 10; fork; side 30",  # the caller's stream prepares the input, and sums up at the end
        f"trunk 2; graph {'a:7:40 ' * 10}; side 12; trunk 1",  # mostly a graph
    ],
)
def test_priorities_of_copies_of_equals_and_of_graphs_do_not_count(tmp_path, steps):
    assert kinds(trace_of(steps, tmp_path, watched=Watched(requests=3, streams=streams(0, 0)))) == []


def test_streams_that_nothing_runs_on_are_found(tmp_path):
    unused = Watched(requests=3, streams=streams(side_operators=0))
    [finding] = find_all(trace_of("trunk 20", tmp_path, watched=unused))
    assert finding.kind == "default-stream" and "1 stream was made" in finding.evidence[0]
    assert "all 60 kernels" in finding.evidence[0]
    for steps in (f"graph {'a:7:40 ' * 10}", "copy HtoD Pinned side; trunk 20"):
        assert kinds(trace_of(steps, tmp_path, watched=unused)) == []
    assert kinds(trace_of("trunk 20", tmp_path)) == []


@pytest.mark.parametrize("kind", ["stream-class", "unrecorded-event", "mixed-devices", "default-stream"])
def test_what_was_noticed_live_is_a_finding(tmp_path, kind):
    watched = Watched(requests=3, noticed=(Noticed(kind, "seen here", ("net.py:12",)),))
    [finding] = find_all(trace_of("trunk 8", tmp_path, watched=watched))
    assert finding.kind == kind and finding.evidence == ("seen here",) and finding.lines == ("net.py:12",)
    compile(finding.snippet, "snippet", "exec")


def test_an_empty_block_is_none_where_the_trace_has_kernels_on_two_streams(tmp_path):
    """Another library may have launched them, which watching does not see."""
    watched = Watched(requests=3, noticed=(Noticed("default-stream", "seen here", ("net.py:12",)),))
    assert kinds(trace_of(OVERLAPPED, tmp_path, watched=watched)) == []


def test_streams_that_a_library_has_for_itself_are_the_trunks(tmp_path):
    def in_line(program):
        run(program, "trunk 6")
        grouped(program)
        run(program, "trunk 1")

    noticed = (Noticed("default-stream", "seen here", ("net.py:12",)),)
    trace = trace_of(in_line, tmp_path, watched=Watched(requests=3, noticed=noticed))
    assert kinds(trace) == ["default-stream"]
    told = weigh(trace)
    assert told.trunk_us == pytest.approx(7 * 40.0 + 60.0) and told.side_us == 0.0

    def mostly_theirs(program):
        run(program, "trunk 2")
        for _ in range(4):
            grouped(program, us=200.0)
        run(program, "trunk 2")

    trace = trace_of(mostly_theirs, tmp_path)
    assert kinds(trace) == [] and trunk_stream(trace) == (0, TRUNK)


def test_races_and_freed_tensors_are_a_finding_each(tmp_path):
    race = Race(
        "[8, 64] float32", "conv writes on stream 7 at net.py:3", "mul reads on stream 21 at net.py:9", ("a:1",)
    )
    freed = Race("[8, 3] float32", "mul reads on stream 21", "freed on stream 7", ("b:2",), freed=True)
    watched = Watched(requests=3, races=(freed, race, race))
    first, second = find_all(trace_of(OVERLAPPED, tmp_path, watched=watched))
    assert (first.kind, second.kind) == ("race", "freed-in-use")
    assert len(first.evidence) == 2 and first.lines == ("a:1",) and "record_stream" in second.snippet


def eager(launches=60, us=3):
    return "; ".join([f"python 20; trunk 1 of {us}"] * launches)


def test_short_kernels_that_the_device_waits_for_are_launch_bound(tmp_path):
    [finding] = find_all(trace_of(eager(), tmp_path))
    assert finding.kind == "launch-bound"
    assert "60 launches a request, 25.0 us apart" in finding.evidence[0]
    runner, graph = finding.snippet.split("# 2. any other model")
    for way, calls in ((runner, "runner(x)"), (graph, "graph.replay()")):
        compile(way, "snippet", "exec")
        assert calls in way
    # 60 launches of 10 us, not what a profiler makes of them, less 60 kernels of 3 us
    assert finding.cost_us == pytest.approx(60 * (10.0 - 3.0), rel=0.02)

    [finding] = find_all(trace_of(eager(), tmp_path, watched=Watched(requests=3, host_us=900.0)))
    assert finding.cost_us == pytest.approx(900.0 - 180.0, rel=0.02)


def test_graphs_long_kernels_and_what_only_a_profiler_slows_are_not_launch_bound(tmp_path):
    for steps in (f"graph {'a:7:3 ' * 60}", eager(us=60), eager(us=8)):
        assert kinds(trace_of(steps, tmp_path)) == []
    assert kinds(trace_of(eager(), tmp_path, watched=Watched(requests=3, host_us=200.0))) == []
    waiting = "; ".join(["trunk 1 of 3; item a.py(1): f; python 5"] * 12)
    assert "launch-bound" not in kinds(trace_of(waiting, tmp_path)), "the host's own waits"


#: The trunk is launched far ahead of the device; the side's work is ready when the first kernel is done.
FULL = "trunk 1 filling; fork; trunk 8 filling; side 20 behind the trunk; side 20; side 20; join; trunk 1 of 5"


def test_work_that_is_ready_and_runs_only_behind_kernels_that_fill_the_device(tmp_path):
    [finding] = find_full_device(trace_of(FULL, tmp_path))
    assert finding.cost_us == pytest.approx(60.0)
    assert "some_kernel on stream 21 was ready" in finding.evidence[0] and "4,096 blocks" in finding.evidence[0]
    assert len(finding.marks) == 3


def test_work_that_crawls_beside_kernels_that_fill_the_device_counts_as_long_as_it_takes_alone(tmp_path):
    """Of its many blocks few find a place; those behind it run when the trunk is done."""

    def crawling(program):
        run(program, "trunk 1 filling; fork; trunk 8 filling")
        begin = program.free[TRUNK] - 200.0
        for us in (200.0, 20.0, 20.0):
            program.kernel(us, SIDE, "void head_kernel(float*)", after=begin)
        run(program, "join; trunk 1 of 5")

    [finding] = find_full_device(trace_of(crawling, tmp_path))
    assert finding.cost_us == pytest.approx(40.0)


def test_work_that_runs_beside_the_trunk_or_waits_for_it_is_not_kept_out(tmp_path):
    def trials(program):
        with program.operator("aten::cudnn_convolution"):
            for _ in range(6):
                program.synchronise("cudaEventSynchronize")
            run(program, FULL)

    def of_a_library(program):
        run(program, "trunk 6 filling")
        grouped(program)
        run(program, "trunk 6 filling")

    beside = FULL.replace(" behind the trunk", "")
    dependent = "trunk 9 filling; fork; side 20; side 20; side 20"
    small = "trunk 9; side 20 behind the trunk; side 20 behind the trunk; side 20 behind the trunk"
    for make in (beside, dependent, small, OVERLAPPED, trials, of_a_library):
        assert not [*find_full_device(trace_of(make, tmp_path))], make


def test_wrong_answers_come_first_then_what_costs_most_and_last_what_nobody_knows(monkeypatch):
    given = [("priority", None), ("host-wait", 5.0), ("mixed-devices", None), ("allocation", 90.0), ("race", None)]

    def find(_trace):
        return [Finding(kind, "", (), "", "", cost_us=cost) for kind, cost in given]

    monkeypatch.setattr(diagnosis, "_ALL", (find,))
    assert kinds(None) == ["race", "mixed-devices", "allocation", "host-wait", "priority"]
    assert set(diagnosis.WRONG) <= set(KINDS)


def test_the_request_of_median_length_is_shown_and_marked(tmp_path):
    trace = of_requests(tmp_path, *(f"trunk {count}; await device; trunk {count}" for count in (10, 40, 20)))
    assert len(trace.shown.work) == 40
    [finding] = find_all(trace)
    assert finding.marks[0].end_us <= trace.shown.end_us


def test_names_of_kernels_lose_types_and_arguments():
    def name(text):
        return short_name(Work("kernel", text, 0.0, 1.0, 0, 7, None))

    assert name("void at::native::reduce_kernel<512, 1, at::F<float> >(at::R)") == "at::native::reduce_kernel"
    assert name("exit_kernel") == "exit_kernel"
    assert name("sm90_xmma_fprop_" + "x" * 90) == ("sm90_xmma_fprop_" + "x" * 90)[:60]
