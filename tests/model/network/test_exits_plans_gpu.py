"""eager_pass.py on a GPU: a network's exits in planned launches, on any stream, thread and beside captures."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from auxhead.model import EagerRunner, EarlyExitNetwork, ExitResult, ExitRule, FusedAuxHead
from cuda.bindings import runtime
from support.example_models import SmallNet, needs_gpu
from support.exits_plan_cases import OF_A_HEAD, TAPS, differ, heads_called, make_network, unplanned
from support.exits_plan_cases import assert_same as assert_exactly
from support.exits_plan_cases import images as few_images
from support.graph_runner_cases import assert_identical, assert_same, clear_batches, exits_at, hold_up, network, spoil
from torch import Tensor, nn
from torch.nn.utils import parametrizations

pytestmark = [*needs_gpu, pytest.mark.usefixtures("repeatable", "without_gradients")]


@pytest.fixture
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def net() -> EarlyExitNetwork:
    return make_network("cuda")


def images(samples: int, side: int = 4) -> Tensor:
    return few_images(samples, side).cuda()


def planned(net: EarlyExitNetwork, x: Tensor, *, stop: bool = False) -> ExitResult:
    """The answer of planned launches alone."""
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
@pytest.mark.parametrize("samples", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_each_sample_gets_the_answer_of_its_exit(dtype: torch.dtype, samples: int, stop: bool) -> None:
    net, exits = network(dtype), set()
    for x in clear_batches(network(), [samples] * 12):
        x = x.to(dtype)
        wanted = unplanned(net, x)
        for _ in range(3):
            assert_same(planned(net, x, stop=stop), wanted)
        assert_same(EagerRunner(net)(x, stop=stop), wanted)
        exits.update(wanted.exit_index.tolist())
    assert exits == {0, 1, 2, 3}


@stops
@pytest.mark.usefixtures("poisoned_empty")
def test_all_of_an_answer_is_written(net: EarlyExitNetwork, stop: bool) -> None:
    for samples in (1, 3, 8):
        x = images(samples)
        wanted = unplanned(net, x)
        for _ in range(3):
            spoil()
            assert_exactly(planned(net, x, stop=stop), wanted)


@pytest.mark.parametrize("index", range(4))
def test_the_forward_is_left_once_all_are_sure(index: int) -> None:
    net, ran = network(), []
    for name in (*SmallNet.taps, "fc"):
        net.backbone.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    with exits_at(net, index):
        for x in clear_batches(network(), [1, 8, 3]):
            wanted = unplanned(net, x)
            for _ in range(2):
                ran.clear()
                assert_same(planned(net, x, stop=True), wanted)
                assert ran == [*SmallNet.taps, "fc"][: index + 1]


def test_logits_that_are_not_finite(net: EarlyExitNetwork) -> None:
    x = images(8)
    x[1], x[4, 0, 0, 0], x[6] = torch.nan, torch.inf, 1e38
    wanted = unplanned(net, x)
    for _ in range(2):
        for name, one, other in zip(ExitResult._fields, planned(net, x), wanted, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")


# What plans rest on


@pytest.mark.parametrize("change", OF_A_HEAD.values(), ids=OF_A_HEAD)
def test_a_change_of_a_head_is_followed(net: EarlyExitNetwork, change: Callable[[FusedAuxHead], object]) -> None:
    x, head = images(8), net.fused_heads[1]
    net.fused_heads[0].rule.enabled = False  # so that this one is heard
    head.rule.assign(ExitRule(0.7, temperature=0.7))
    follows(net, x, x[:1])
    before = unplanned(net, x)
    change(head)
    found = [net(x), net(x, stop=True), net(x[:1]), net(x[:1], stop=True)]
    for one, batch in zip(found, (x, x, x[:1], x[:1]), strict=True):
        assert_exactly(one, unplanned(net, batch))
    assert differ(before, unplanned(net, x)), "the change is to show"
    follows(net, x, x[:1])


def _negate(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.neg_()


def _replace_a_head(net: EarlyExitNetwork) -> None:
    net.heads[0] = make_network("cuda").fused_heads[1]
    net.heads[0].rule.threshold = 0.3


OF_A_NETWORK: dict[str, Callable[[EarlyExitNetwork], object]] = {
    "a head": _replace_a_head,
    "heads in another order": lambda net: setattr(net, "heads", nn.ModuleList([*net.heads][::-1])),
    "thresholds": lambda net: net.set_rules(0.0),
    "a rule": lambda net: net.set_rules({"first": ExitRule(0.2, temperature=3.0)}),
    "a disabled rule": lambda net: setattr(net.fused_heads[0].rule, "enabled", False),
    "parameters of the backbone": lambda net: _negate(net.backbone.first),
    "the backbone": lambda net: setattr(net, "backbone", make_network("cuda").backbone.apply(_negate)),
    "memory": lambda net: net.cpu().cuda().apply(_negate),
    "dtype": lambda net: net.half(),
}


@stops
@pytest.mark.parametrize("change", OF_A_NETWORK.values(), ids=OF_A_NETWORK)
def test_a_change_of_the_network_is_followed(
    net: EarlyExitNetwork, change: Callable[[EarlyExitNetwork], object], stop: bool
) -> None:
    x = images(8)
    before = unplanned(net, x)
    for _ in range(2):
        planned(net, x, stop=stop)
    change(net)
    spoil()
    x = x.to(net.backbone.fc.weight.dtype)
    wanted = unplanned(net, x)
    assert differ(before, wanted), "the change is to show"
    for _ in range(3):
        assert_exactly(planned(net, x, stop=stop), wanted)


def test_batches_of_many_layouts_in_turn(net: EarlyExitNetwork) -> None:
    x = images(8)
    follows(
        net, x, x[:1], x[2:5], x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3),
        x[:1].expand(4, -1, -1, -1), images(3, side=6), images(1, side=9), torch._neg_view(x[:3]), x[:0],
    )  # fmt: skip
    for samples in range(1, 40):
        batch = torch.randn(samples, 3, 4, 4, device="cuda")
        assert_same(net(batch), unplanned(net, batch), 1e-5)
    follows(net, x)


def test_weights_that_are_computed(net: EarlyExitNetwork) -> None:
    x = images(3)
    planned(net, x)
    parametrizations.weight_norm(net.fused_heads[0].linear)
    follows(net, x)


def test_a_copy_answers_for_itself(net: EarlyExitNetwork) -> None:
    x = images(8)
    wanted = planned(net, x)
    other = copy.deepcopy(net)
    other.heads.apply(_negate)
    follows(other, x)
    assert_exactly(planned(net, x), wanted)
    net.heads.apply(_negate)
    follows(net, x)


def test_under_autocast(net: EarlyExitNetwork) -> None:
    x = images(8)
    plain = planned(net, x)
    for _ in range(2):
        with torch.autocast("cuda", torch.float16):
            wanted = unplanned(net, x)
            for stop in (False, True):
                assert_exactly(net(x, stop=stop), wanted)
        assert_exactly(planned(net, x), plain)


@stops
@pytest.mark.parametrize("layer", [*TAPS, "fc"])
def test_an_error_in_the_backbone_leaves_no_hooks(net: EarlyExitNetwork, layer: str, stop: bool) -> None:
    net.set_rules(1.0)
    x = images(3)
    wanted = planned(net, x, stop=stop)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    before = [dict(one._forward_hooks) for one in net.modules()]
    handle = net.backbone.get_submodule(layer).register_forward_pre_hook(fail)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            net(x, stop=stop)
    handle.remove()
    assert [dict(one._forward_hooks) for one in net.modules()] == before
    assert_exactly(planned(net, x, stop=stop), wanted)


# Streams, threads and captures


def new_stream() -> torch.cuda.Stream:
    status, handle = runtime.cudaStreamCreateWithPriority(runtime.cudaStreamNonBlocking, 0)
    assert not status
    return torch.cuda.ExternalStream(int(handle))


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


def test_a_callers_graph_between_planned_calls() -> None:
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
