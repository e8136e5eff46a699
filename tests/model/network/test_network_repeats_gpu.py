"""eager_pass.py on a GPU: a network's exits in repeated launches, on any stream, thread and beside captures."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from auxhead.model import EarlyExitNetwork, ExitResult
from support.example_models import needs_gpu
from support.exits_plan_cases import assert_same as assert_exactly
from support.exits_plan_cases import heads_called, make_network, unplanned
from support.exits_plan_cases import images as few_images
from support.gpu_work import new_stream
from support.graph_runner_cases import assert_identical, assert_same, clear_batches, exits_at, hold_up, network, spoil
from torch import Tensor

pytestmark = [*needs_gpu, pytest.mark.usefixtures("repeatable", "without_gradients")]


@pytest.fixture
def net() -> EarlyExitNetwork:
    return make_network("cuda")


def images(samples: int, side: int = 4) -> Tensor:
    return few_images(samples, side).cuda()


def planned(net: EarlyExitNetwork, x: Tensor, *, stop: bool = False) -> ExitResult:
    """The answer of repeated launches alone."""
    with heads_called() as called:
        result = net(x, stop=stop)
    assert not called, "heads were called one by one"
    return result


def follows(net: EarlyExitNetwork, *batches: Tensor) -> None:
    """Assert that each batch, again and again, gets what heads that are called one by one say now."""
    for _ in range(3):
        for x in batches:
            wanted = unplanned(net, x)
            for stop in (False, True):
                assert_exactly(net(x, stop=stop), wanted)


stops = pytest.mark.parametrize("stop", [False, True], ids=["all run", "stop"])


@stops
@pytest.mark.parametrize("make", [torch.cuda.default_stream, torch.cuda.Stream, new_stream])
def test_callers_streams(net: EarlyExitNetwork, make: Callable[[], torch.cuda.Stream], stop: bool) -> None:
    """The input may be late, and be overwritten at once; the answer is used at once, and given back."""
    x = images(8)
    wanted, late = unplanned(net, x), torch.full_like(x, torch.nan)
    for stream in (make(), make()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(6):
                hold_up(stream, 2_000_000)
                late.copy_(x)
                result = net(late, stop=stop)
                late.fill_(torch.nan)
                used = ExitResult(*(part.clone() for part in result))
                del result
                spoil()
                stream.synchronize()
                assert_exactly(used, wanted)


def test_several_streams_at_once(net: EarlyExitNetwork) -> None:
    """Held up, so that their launches are under way together."""
    batches = [images(8), images(8).flip(0), -images(8)]
    wanted = [unplanned(net, x) for x in batches]
    streams = [torch.cuda.Stream(), torch.cuda.Stream(priority=-1), new_stream()]
    for _ in range(5):
        torch.cuda.synchronize()
        for stream in streams:
            hold_up(stream)
        found = []
        for _ in range(5):
            for stream, x in zip(streams, batches, strict=True):
                with torch.cuda.stream(stream):
                    found.append(net(x))
        torch.cuda.synchronize()
        for index, one in enumerate(found):
            assert_exactly(one, wanted[index % 3])


def test_rules_that_were_assigned_on_another_stream(net: EarlyExitNetwork) -> None:
    x, asks, assigns = images(3), torch.cuda.Stream(), torch.cuda.Stream()
    for turn in range(6):
        torch.cuda.synchronize()
        hold_up(assigns)
        with torch.cuda.stream(assigns):
            net.set_rules(float(turn % 2))
        with torch.cuda.stream(asks):
            found = net(x)
        torch.cuda.synchronize()
        assert found.exit_index.tolist() == [3 * (turn % 2)] * 3


@pytest.mark.parametrize("own_streams", [False, True], ids=["default stream", "own streams"])
@stops
def test_two_threads_run_one_network(net: EarlyExitNetwork, own_streams: bool, stop: bool) -> None:
    batches = [images(8), images(3)]
    wanted = [unplanned(net, x) for x in batches]
    torch.cuda.synchronize()
    meeting, errors = threading.Barrier(2), []

    def run(index: int) -> None:
        try:
            stream = torch.cuda.Stream() if own_streams else None
            with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
                for turn in range(100):
                    meeting.wait(timeout=60)
                    which = index if turn % 3 else 1 - index
                    result = net(batches[which], stop=stop)
                    torch.cuda.current_stream().synchronize()
                    assert_exactly(result, wanted[which])
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_a_callers_graph_between_repeated_calls() -> None:
    net = network()
    batches = clear_batches(net, [8] * 4)
    static, stream = batches[0].clone(), torch.cuda.Stream()
    wanted = [unplanned(net, x) for x in batches]
    with torch.cuda.stream(stream):
        for _ in range(3):
            net(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = net(static)
    for x, right in zip(batches, wanted, strict=True):
        static.copy_(x)
        with torch.cuda.stream(stream):
            beside = net(batches[1])
        graph.replay()
        torch.cuda.synchronize()
        assert_same(beside, wanted[1])
        assert_same(captured, right)
    with exits_at(net, 0):
        graph.replay()
        assert captured.exit_index.eq(0).all()
        assert net(batches[0]).exit_index.eq(0).all()


def test_while_another_thread_captures() -> None:
    """An eager pass neither breaks the capture nor becomes part of it."""
    net = network()
    (x,) = clear_batches(net, [8])
    wanted, y = [net(x) for _ in range(3)][2], torch.ones(8, device="cuda")
    torch.cuda.synchronize()

    def ask() -> list[ExitResult]:
        return [net(x), net(x, stop=True), net(x[:5])]

    graph = torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as other_thread:
        other_thread.submit(ask).result()  # libraries make handles for each thread
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            z = y + 1
            found = other_thread.submit(ask).result()
    graph.replay()
    torch.cuda.synchronize()
    assert z.eq(2).all() and len(found) == 3
    assert_identical(found[0], wanted)
    assert_same(found[1], wanted)
