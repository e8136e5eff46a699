"""fused_head.py on a GPU: one head on several streams, threads and CUDA graphs at the same time."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from auxhead.kernels import HeadOutput, fused_head
from auxhead.kernels.launch.arrival_counters import arrival_counters
from support.gpu_work import work_on_the_gpu
from support.head_cases import assert_same_bits, check_head, make_head, make_input, readable

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# several programs a sample each, so that two launches have something to confuse
HEADS = {
    "map": ((8, 512, 7, 7), 10, {}),
    "many classes": ((2, 512, 7, 7), 1000, {}),
    "groups": ((64, 512, 2, 2), 1000, {}),
    "flattened": ((2, 64, 28, 28), 10, {"pool": "none"}),
}
every_head = pytest.mark.parametrize("shape, classes, pooling", HEADS.values(), ids=HEADS)


def two_inputs(shape, classes, pooling):
    """Two inputs of one head, and a right answer for each."""
    x, weight, bias = make_head(shape, classes, dtype=torch.float16, device="cuda", **pooling)
    inputs = [x, make_input(shape, dtype=torch.float16, device="cuda", seed=7)]
    answers = [check_head(x, weight, bias, **pooling) for x in inputs]
    torch.cuda.synchronize()
    return inputs, answers, lambda x: fused_head(x, weight, bias, threshold=0.5, **pooling)


def capture(call, warm=True):
    """Capture ``call`` and return the graph and what its replays write."""
    stream = torch.cuda.Stream()
    if warm:
        with torch.cuda.stream(stream):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = call()
    torch.cuda.synchronize()
    return graph, out


def spoil(out):
    """Overwrite an answer, so that a replay that writes nothing shows."""
    for tensor in out:
        tensor.fill_(float("nan") if tensor.is_floating_point() else True if tensor.dtype == torch.bool else -1)


def replay(graph, out):
    """Replay on the current stream and return a copy of the answer."""
    spoil(out)
    graph.replay()
    return HeadOutput(*(tensor.clone() for tensor in out))


def assert_all_same(outs, answer):
    torch.cuda.synchronize()
    for out in outs:
        assert_same_bits(out, answer)


@every_head
def test_two_streams_at_once(shape, classes, pooling):
    inputs, answers, head = two_inputs(shape, classes, pooling)
    streams = [torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    outs = [[], []]
    for _ in range(20):
        for stream in streams:  # both wait a little, so that launches pile up and then run side by side
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
        for _ in range(20):
            for stream, x, kept in zip(streams, inputs, outs, strict=True):
                with torch.cuda.stream(stream):
                    kept.append(head(x))
    for kept, answer in zip(outs, answers, strict=True):
        assert_all_same(kept, answer)


@every_head
def test_two_threads_on_two_streams(shape, classes, pooling):
    inputs, answers, head = two_inputs(shape, classes, pooling)

    def work(x):
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [head(x) for _ in range(200)]
            torch.cuda.current_stream().synchronize()
        return outs

    with ThreadPoolExecutor(2) as pool:
        for outs, answer in zip(pool.map(work, inputs), answers, strict=True):
            assert_all_same(outs, answer)


@every_head
def test_replays_between_eager_calls_on_another_stream(shape, classes, pooling):
    inputs, answers, head = two_inputs(shape, classes, pooling)
    graph, static = capture(lambda: head(inputs[0]))
    other = torch.cuda.Stream()
    replayed, eager = [], []
    for _ in range(100):
        replayed.append(replay(graph, static))
        with torch.cuda.stream(other):
            eager.append(head(inputs[1]))
    assert_all_same(replayed, answers[0])
    assert_all_same(eager, answers[1])


@every_head
def test_two_graphs_replay_at_once(shape, classes, pooling):
    inputs, answers, head = two_inputs(shape, classes, pooling)
    captured = [capture(lambda x=x: head(x)) for x in inputs]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    outs = [[], []]
    for step in range(100):
        for stream, (graph, static), kept in zip(streams, captured, outs, strict=True):
            with torch.cuda.stream(stream):
                if step % 25 == 0:
                    torch.cuda._sleep(2_000_000)
                kept.append(replay(graph, static))
    for kept, answer in zip(outs, answers, strict=True):
        assert_all_same(kept, answer)


@every_head
def test_two_heads_side_by_side_in_one_graph(shape, classes, pooling):
    """The trunk's stream and the side stream of one capture."""
    inputs, answers, head = two_inputs(shape, classes, pooling)
    side = torch.cuda.Stream()

    def forked():
        trunk = torch.cuda.current_stream()
        side.wait_stream(trunk)
        with torch.cuda.stream(side):
            first = head(inputs[0])
        second = head(inputs[1])
        trunk.wait_stream(side)
        return first, second

    graph, statics = capture(forked)
    for _ in range(50):
        for static in statics:
            spoil(static)
        graph.replay()
        torch.cuda.synchronize()
        for static, answer in zip(statics, answers, strict=True):
            assert_same_bits(static, answer)


def test_a_graph_reads_new_inputs_and_rules():
    """Input, temperature and threshold are read at every replay."""
    x, weight, bias = make_head((9, 64, 7, 7), 10, device="cuda")
    temperature, threshold = torch.tensor(1.0, device="cuda"), torch.tensor(0.5, device="cuda")
    graph, static = capture(lambda: fused_head(x, weight, bias, temperature=temperature, threshold=threshold))
    for seed, heat, limit in ((3, 1.0, 0.5), (4, 0.3, 0.9), (5, 2.0, 0.0), (6, 1.0, 1.0)):
        x.copy_(make_input((9, 64, 7, 7), device="cuda", seed=seed))
        temperature.fill_(heat)
        threshold.fill_(limit)
        out = replay(graph, static)
        assert_same_bits(out, check_head(x, weight, bias, temperature=temperature, threshold=threshold))


@pytest.mark.parametrize("shape", [(1, 512), (3, 512), (5, 64, 7, 7)], ids=readable)
def test_a_capture_after_other_captures_compiles_nothing(shape, monkeypatch):
    """A warmed-up head is compiled: the counters of its capture may not make it another kernel."""
    import triton

    head = make_head(shape, 10, device="cuda")
    fused_head(*head)
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **kwargs: compiled.append(kwargs["repr"]))
    captured = [capture(lambda: fused_head(*head), warm=False) for _ in range(6)]
    assert not compiled
    answer = fused_head(*head)
    for graph, static in captured:
        assert_all_same([replay(graph, static)], answer)


def test_captures_beyond_the_reserve_of_counters():
    """30,000 counters a capture: the reserve runs out, is filled again by an eager call, and all graphs stay right."""
    x, weight, bias = make_head((30_000, 64, 2, 2), 7, device="cuda")
    call = lambda: fused_head(x, weight, bias, threshold=0.5)  # noqa: E731
    answer = check_head(x, weight, bias)
    captured = [capture(call, warm=False) for _ in range(12)]
    assert_all_same([call()], answer)
    captured += [capture(call, warm=False) for _ in range(6)]
    for _ in range(2):
        outs = [replay(graph, static) for graph, static in reversed(captured)]
        outs.append(call())
        assert_all_same(outs, answer)
    assert not arrival_counters(x.device).take(30_000).any()


def test_many_launches_in_a_capture_need_no_node_that_clears_counters(tmp_path):
    """Together they have more counters than are kept ready."""
    x, weight, bias = make_head((30_000, 64, 2, 2), 7, dtype=torch.float16, device="cuda")
    call = lambda: [fused_head(x, weight, bias, threshold=0.5) for _ in range(200)]  # noqa: E731
    fused_head(x, weight, bias, threshold=0.5)
    graph, static = capture(call, warm=False)
    assert set(work_on_the_gpu(graph.replay, tmp_path)) <= {"pack_kernel", "exit_kernel"}
    assert_all_same([static[0]], static[-1])
    check_head(x, weight, bias, threshold=0.5, out=static[-1])


def test_a_graph_outlives_the_graphs_before_it():
    """Counters of a capture are its own for good, also after another graph is gone."""
    inputs, answers, head = two_inputs(*HEADS["map"])
    for _ in range(5):
        graph, static = capture(lambda: head(inputs[0]))
        replay(graph, static)
        torch.cuda.synchronize()
        del graph, static
        torch.cuda.empty_cache()
    graph, static = capture(lambda: head(inputs[1]))
    assert_all_same([replay(graph, static) for _ in range(20)], answers[1])
    assert_all_same([head(inputs[0])], answers[0])
