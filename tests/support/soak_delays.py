"""Delays of the soak run: on callers' streams and on runners' own, and within the graphs that runners capture."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from unittest import mock

import torch
from auxhead.model import EarlyExitNetwork, Runner
from auxhead.model.runners.graph_runner import GraphRunner
from auxhead.model.runners.program import HeadLaunches
from support.graph_runner_cases import hold_up

_MOST_US = 200.0
#: Shares of the places in a graph, and of the requests, that get a delay: a request takes some 400 us.
_IN_GRAPHS, _AT_REQUESTS = 0.2, 0.3


def cycles_per_us() -> float:
    """Measure how many cycles of ``torch.cuda._sleep`` are a microsecond on the current device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for cycles in (1_000_000, 20_000_000):  # the first one wakes the device
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize()
    return cycles / (begin.elapsed_time(end) * 1e3)


class Delays:
    """Random delays of up to 200 us."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._cycles_per_us = cycles_per_us()

    def cycles(self, share: float) -> int:
        """Draw a length, 0 but for a share of the times."""
        if self._random.random() >= share:
            return 0
        return 1 + int(self._random.random() * _MOST_US * self._cycles_per_us)

    def within_captures(self) -> None:
        """Delay what follows on the current stream, in the graph that is being captured if there is one."""
        if torch.cuda.is_current_stream_capturing() and (cycles := self.cycles(_IN_GRAPHS)):
            torch.cuda._sleep(cycles)

    def before(self, caller: torch.cuda.Stream, runner: Runner) -> None:
        """Delay the stream of a request that is about to be made, or one of those that work for it."""
        if cycles := self.cycles(_AT_REQUESTS):
            streams = runner._captures.streams if isinstance(runner, GraphRunner) else None
            its = () if streams is None else (streams.trunk, streams.side)
            hold_up(self._random.choice((caller, caller, *its)), cycles)

    def after(self, stream: torch.cuda.Stream) -> None:
        """Delay what follows on a stream."""
        if cycles := self.cycles(_AT_REQUESTS / 3):
            hold_up(stream, cycles)

    @contextmanager
    def in_graphs(self, networks: list[EarlyExitNetwork]) -> Iterator[None]:
        """Put delays into graphs: around each launch of heads, on its stream, and around each layer on the trunk's."""
        launch: Callable[..., None] = HeadLaunches.launch

        def delayed(*arguments: object) -> None:
            self.within_captures()
            launch(*arguments)
            self.within_captures()

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(HeadLaunches, "launch", delayed))
            for network in networks:
                for layer in network.backbone.children():
                    before = layer.register_forward_pre_hook(lambda *_: self.within_captures())
                    after = layer.register_forward_hook(lambda *_: self.within_captures())
                    stack.callback(before.remove)
                    stack.callback(after.remove)
            yield
