"""A runner's work in order, simulated on the CPU: captures, requests of several streams, refresh, close: no races.

The waits that this needs are the mutants of ``tests/mutants/waits.toml``.
"""

import gc
from collections.abc import Callable

import pytest
import torch
from auxhead.model import EarlyExitNetwork, make_runner
from auxhead.model.answers import rule_order
from auxhead.model.runners.graph_runner import GraphRunner
from auxhead.model.runners.overlapped import OverlappedRunner
from auxhead.model.runners.polled import PolledRunner
from support import graph_runner_cases, stream_order
from support.example_models import SmallNet, plain_heads
from support.stream_order import OfOthers, Stream
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

pytestmark = pytest.mark.usefixtures("simulation")

WAYS = {**graph_runner_cases.WAYS, "forks": {"exits": "overlapped", "forks": SmallNet.taps[:2]}}


def others_get_what_is_free() -> None:
    gc.collect()
    torch.ones(3) + 1


def small(threshold: float = 1.0, samples: int = 2, side: int = 4) -> tuple[EarlyExitNetwork, Tensor]:
    """A network whose heads have a threshold, and a batch."""
    torch.manual_seed(0)
    return EarlyExitNetwork(SmallNet(), plain_heads(), threshold).eval(), torch.randn(samples, 3, side, side)


@pytest.mark.parametrize("way", WAYS)
def test_runners_have_no_races(way: str) -> None:
    network, _ = small(0.5)
    runner = make_runner(network, torch.randn(4, 3, 8, 8), batch_sizes=(1, 4), trunk="cudnn", **WAYS[way])
    streams = [Stream(), Stream()]
    thresholds = (0.0, 1.0)  # all leave at the first head, or none at any
    for turn in range(6):
        network.set_rules(thresholds[turn % 2])
        with stream_order.current(streams[turn % 3 % 2]):
            x = torch.randn(1 if turn == 4 else 4, 3, 8, 8)
            answer = runner(x)
            x += 1  # as soon as the answer is asked for
            assert (answer.label + answer.confidence).shape == (len(x),)
            del x, answer
        if turn == 3:
            with stream_order.current(Stream()):
                runner.refresh()
    network.set_rules(0.0)
    with stream_order.current(streams[1]):
        runner(torch.randn(4, 3, 8, 8))  # leaves a graph under way that it did not need
    runner.close()
    others_get_what_is_free()


@pytest.mark.parametrize("way", WAYS)
def test_requests_come_on_another_stream_than_the_constructor_and_on_that_again(way: str) -> None:
    """No rule is assigned, which would order streams, too."""
    network, _ = small(0.5)
    runner = make_runner(network, torch.randn(4, 3, 8, 8), batch_sizes=(4,), **WAYS[way])
    with stream_order.current(Stream()):
        runner(torch.randn(4, 3, 8, 8))
    runner(torch.randn(4, 3, 8, 8))
    runner.close()


@pytest.mark.parametrize("way", ["polled", "compact"])
def test_a_request_that_is_interrupted_while_it_polls(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = small(1.0, 4, 8)
    runner = make_runner(network, x, batch_sizes=(1, 4), **WAYS[way])
    with stream_order.current(Stream()):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(type(runner), "_poll", interrupted)
            runner(x)
        wanted = network(x)
        found = runner(x)
        assert torch.equal(found.label, wanted.label) and torch.equal(found.exit_index, wanted.exit_index)
    runner.close()


def interrupted(*_: object) -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize("way", ["overlapped", "polled"])
@pytest.mark.parametrize("then", ["close", "ask", "assign"])
def test_a_request_that_is_interrupted_as_its_end_is_recorded(way: str, then: str) -> None:
    network, x = small()
    runner = make_runner(network, x, batch_sizes=(2,), **WAYS[way])
    was_interrupted = False
    with stream_order.current(Stream()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner._done, "record", interrupted)
        try:
            runner(x)
        except KeyboardInterrupt:
            was_interrupted = True
    if then == "ask":
        runner(x)
    elif then == "assign":
        network.set_rules(0.5)
    runner.close()
    del runner
    others_get_what_is_free()
    assert was_interrupted


def test_a_stream_is_destroyed_once_it_has_asked() -> None:
    network, x = small()
    runner = make_runner(network, x, batch_sizes=(2,), exits="overlapped")
    for _ in range(2):
        stream = OfOthers()
        with stream_order.current(stream):
            runner(x)
        stream.gone = True
    network.set_rules(0.5)
    runner.close()


@pytest.mark.parametrize("other", [Stream, OfOthers], ids=["of PyTorch", "of others"])
def test_an_eager_runners_trunk_is_refreshed_on_another_stream(other: Callable[[], Stream]) -> None:
    network, x = small()
    runner = make_runner(network, x, exits="eager", trunk="cudnn")
    for _ in range(2):
        with stream_order.current(other()):
            runner(x)
        with stream_order.current(Stream()):
            runner.refresh()
    with stream_order.current(Stream()):
        runner(x)


@pytest.mark.parametrize("way", WAYS)
def test_a_runner_is_made_just_after_its_rules_were_assigned(way: str) -> None:
    network, x = small()
    with stream_order.current(Stream()):
        network.set_rules(0.5)
    make_runner(network, x, batch_sizes=(2,), **WAYS[way]).close()


@pytest.mark.parametrize("way", WAYS)
def test_a_rule_is_assigned_while_another_thread_makes_a_runner(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait of the streams that capture would break the capture."""
    network, x = small(0.5)
    network.check_taps(x)
    wait_event, waited, other = Stream.wait_event, set(), Stream()

    def wait(stream: Stream, event: stream_order.Event) -> None:
        waited.add(stream)
        wait_event(stream, event)

    def assign(*_: object) -> None:
        with stream_order.current(other), _disable_current_modes(), monkeypatch.context() as patch:
            patch.setattr(Stream, "wait_event", wait)
            network.set_rules(0.5)

    network.backbone.fc.register_forward_pre_hook(assign)
    runner = make_runner(network, x, batch_sizes=(1, 2), **WAYS[way])
    assert isinstance(runner, GraphRunner) and other in waited
    assert not waited & {runner._captures.streams.trunk, runner._captures.streams.side}


@pytest.mark.parametrize("way", ["polled", "compact"])
def test_a_trunk_is_refreshed_while_a_graph_is_under_way_that_a_request_did_not_need(way: str) -> None:
    network, x = small(0.0)
    runner = make_runner(network, x, batch_sizes=(2,), trunk="cudnn", **WAYS[way])
    assert isinstance(runner, PolledRunner)
    other = OverlappedRunner(network, x, batch_sizes=(2,), trunk=runner.trunk)
    for one in (runner, other):
        runner(x)
        one.refresh()
    runner.close()
    network.set_rules(0.5)  # of heads that the closed runner has read
    other.close()


def test_memory_of_a_trunk_that_goes_comes_to_others_once_it_is_not_in_use() -> None:
    network, x = small()
    for use in (lambda runner: runner.refresh(), lambda runner: runner(x)):
        runner = make_runner(network, x, exits="eager", trunk="cudnn")
        with stream_order.current(Stream()):
            use(runner)
        runner.close()
        del runner
        others_get_what_is_free()


def test_memory_of_rules_that_go_comes_to_others_once_it_is_not_in_use() -> None:
    network, _ = small()
    with stream_order.current(Stream()):
        network.set_rules(0.5)
    del network
    others_get_what_is_free()


def test_runners_that_share_a_trunk_are_refreshed_by_each_other() -> None:
    network, x = small()
    runner = make_runner(network, x, batch_sizes=(2,), trunk="cudnn", exits="overlapped")
    assert isinstance(runner, OverlappedRunner)
    other = PolledRunner(network, x, batch_sizes=(2,), trunk=runner.trunk)
    for one, two in ((runner, other), (other, runner)):
        one(x)
        with stream_order.current(Stream()):
            two.refresh()
        one(x)


def test_a_refresh_that_writes_nothing_comes_after_the_last_request_too() -> None:
    network, x = small()
    runner = make_runner(network, x, batch_sizes=(2,), exits="overlapped")
    for call in (lambda: runner(x), runner.refresh, lambda: runner(x)):
        with stream_order.current(Stream()):
            call()


def test_a_runner_closed_after_a_refresh() -> None:
    network, x = small()
    runner = make_runner(network, x, batch_sizes=(2,), trunk="cudnn", exits="overlapped")
    with stream_order.current(Stream()):
        runner.refresh()
    runner.close()
    del runner
    others_get_what_is_free()


def test_a_rule_is_assigned_while_another_thread_reads_it_for_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = small()
    runner, rule = make_runner(network, x, batch_sizes=(2,), exits="overlapped"), network.fused_heads[0].rule
    rule.threshold = 0.5

    def read() -> None:
        with stream_order.current(Stream()):
            rule_order.wait_for_write(rule, x)

    read()
    readers = [make_runner(network, x, batch_sizes=(2,), exits="overlapped") for _ in range(2)]

    def beside(*_: object) -> None:
        read()
        if readers:
            rule_order.note_reader([rule], readers.pop())

    monkeypatch.setattr(rule_order, "capture_id", beside)
    monkeypatch.setattr(OverlappedRunner, "last_reads", property(lambda self: beside() or (self._done,)))
    rule.threshold = 0.25
    runner.close()
