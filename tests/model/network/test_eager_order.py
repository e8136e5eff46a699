"""Eager passes and rules on several streams, simulated on the CPU: nothing uses the same memory at the same time."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext

import pytest
import torch
from auxhead.model import EarlyExitNetwork, ExitRule
from auxhead.model.answers import rule_order
from auxhead.model.basics.streams import StreamPair
from auxhead.model.network import eager_pass
from support import stream_order
from support.example_models import SmallNet, plain_heads
from support.stream_order import OfOthers, OfPyTorch, Stream, Watching


@pytest.fixture
def network() -> EarlyExitNetwork:
    return EarlyExitNetwork(SmallNet(), plain_heads(), 0.5, example_input=torch.randn(2, 3, 8, 8)).eval()


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the CPU for a GPU."""
    stream_order.patched(monkeypatch)
    for module in (eager_pass, rule_order):
        monkeypatch.setattr(module, "has_streams", lambda _x: True)
        monkeypatch.setattr(module, "is_capturing", lambda _device: False)
    monkeypatch.setattr(rule_order, "stream_pair", lambda _device: StreamPair(Stream(), Stream()))
    monkeypatch.setattr(eager_pass, "beside_captures", nullcontext)
    monkeypatch.setattr(rule_order, "capture_id", lambda _handle: None)
    monkeypatch.setattr(rule_order, "current_handle", lambda _device: stream_order.order.current.cuda_stream)


def callers(network: EarlyExitNetwork) -> None:
    """Requests of two streams that know nothing of each other, each of a batch that its stream has just written."""
    askers = [Stream(), Stream()]
    with torch.no_grad(), Watching():
        for turn in range(6):
            with stream_order.current(askers[turn % 2]):
                x = torch.randn(2, 3, 8, 8)
                answer = network(x)
                assert (answer.confidence + answer.label).shape == (2,)
                del x, answer


def one_caller(network: EarlyExitNetwork) -> None:
    with torch.no_grad(), Watching():
        for _ in range(3):
            x = torch.randn(2, 3, 8, 8)
            answer = network(x)
            x += 1  # it may be overwritten once the answer is asked for
            answer.confidence.add(answer.label)
            del answer


def two_threads(network: EarlyExitNetwork) -> None:
    """While the head of one request is about to run, another thread's request runs from beginning to end."""
    between, other = [Stream(), Stream()], copy.deepcopy(network)

    def other_thread(_head: object, _inputs: object) -> None:
        if between:
            with stream_order.current(between.pop()):
                answer = other(torch.randn(2, 3, 8, 8))
                assert (answer.confidence + answer.label).shape == (2,)

    handle = network.heads[1].register_forward_pre_hook(other_thread)
    try:
        callers(network)
    finally:
        handle.remove()


@pytest.mark.parametrize("requests", [callers, one_caller, two_threads])
def test_an_eager_pass_has_no_races(network: EarlyExitNetwork, requests: Callable[[EarlyExitNetwork], None]) -> None:
    requests(network)


def test_rules_are_assigned_and_used_on_any_streams(network: EarlyExitNetwork) -> None:
    streams = [Stream(), Stream(), Stream()]
    with torch.no_grad(), Watching():
        for turn in range(6):
            for stream in (streams[2], streams[turn % 2]):
                with stream_order.current(stream):
                    network.set_rules(0.1 * turn)
            with stream_order.current(streams[(turn + 1) % 2]):
                network(torch.randn(2, 3, 8, 8))
                network.heads[0](torch.randn(2, 8, 4, 4))


class Default(OfPyTorch):
    """The default stream of the device, the one of PyTorch's whose id is its handle."""

    cuda_stream = stream_id = 0

    def __init__(self) -> None:
        self.clock = {}

    @classmethod
    def some(cls) -> list[OfPyTorch]:
        return [cls()] * 2


@pytest.mark.parametrize("kind", [OfPyTorch, Default, OfOthers])
def test_a_rule_is_assigned_after_heads_on_any_stream_have_read_it(
    network: EarlyExitNetwork, kind: type[OfPyTorch]
) -> None:
    head, x, other = network.heads[0], torch.randn(2, 8, 4, 4), Stream()
    with torch.no_grad(), Watching():
        for turn in range(3):
            with stream_order.current(other):
                head.rule.assign(ExitRule(0.2 * turn, temperature=1.0 + turn))
            for stream in kind.some():
                with stream_order.current(stream):
                    head(x)
                    head(x)
                stream.gone = True


class Reader:
    def __init__(self) -> None:
        self.last_reads = (stream_order.Event(),)


def test_a_rule_is_assigned_while_other_threads_use_it_for_the_first_time(
    network: EarlyExitNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, x = network.heads[0], torch.randn(2, 8, 4, 4)
    wait_stream, wait_event, others = Stream.wait_stream, Stream.wait_event, []

    def in_another_thread() -> None:
        others.append(Reader())
        rule_order.note_reader([head.rule], others[-1])
        with stream_order.current(Stream()):
            head(x)

    def meanwhile(wait: Callable[..., None]) -> Callable[..., None]:
        def waits(stream: Stream, other: object) -> None:
            wait(stream, other)
            if assigning and len(others) < 4:
                in_another_thread()

        return waits

    assigning = False
    monkeypatch.setattr(Stream, "wait_stream", meanwhile(wait_stream))
    monkeypatch.setattr(Stream, "wait_event", meanwhile(wait_event))
    with torch.no_grad():
        head.rule.threshold = 0.3
        in_another_thread()
        assigning = True
        head.rule.threshold = 0.4
    assert len(others) == 4 and head.rule.threshold_tensor.item() == pytest.approx(0.4)


def test_a_rule_is_assigned_once_another_thread_has_assigned_it(
    network: EarlyExitNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the device may end with the values of one, and the host with those of the other."""
    rule, wait_event, began, done = network.heads[0].rule, Stream.wait_event, [], []
    rule.threshold = 0.3
    with ThreadPoolExecutor(1) as other_thread:

        def meanwhile(stream: Stream, event: stream_order.Event) -> None:
            wait_event(stream, event)
            if not began:
                began.append(True)
                other = other_thread.submit(setattr, rule, "threshold", 0.5)
                wait([other], timeout=0.2)
                done.append(other.done())

        monkeypatch.setattr(Stream, "wait_event", meanwhile)
        rule.threshold = 0.4
    assert done == [False] and rule.threshold == 0.5 and rule.threshold_tensor.item() == 0.5


def test_rules_within_a_callers_capture_are_ordered_by_who_replays_it(
    network: EarlyExitNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait for what is not captured would break the capture, and nobody could wait for what is."""
    stream = Stream()
    with torch.no_grad():
        network.set_rules(0.25)
        with stream_order.current(stream), monkeypatch.context() as patch:
            patch.setattr(rule_order, "is_capturing", lambda _device: True)
            patch.setattr(Stream, "wait_event", None)
            patch.setattr(Stream, "wait_stream", None)
            patch.setattr(torch.cuda, "Event", None)
            before = rule_order.count_writes()
            network.heads[0].rule.threshold = 0.75
            network.heads[0](torch.randn(2, 8, 4, 4))
            assert rule_order.count_writes() == before
