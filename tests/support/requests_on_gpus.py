"""Requests that the GPU tests of all kinds of runners make: one after another, and on several streams."""

from collections.abc import Callable, Sequence

import torch
from auxhead.model import ExitResult
from support.graph_runner_cases import assert_same, hold_up, spoil
from torch import Tensor

Ask = Callable[[Tensor], ExitResult]


def assert_back_to_back(runner: Ask, batches: Sequence[Tensor], wanted: Sequence[ExitResult]) -> None:
    """Ask for batches in turn while the device is held up, so that nothing waits in between; results are kept."""
    torch.cuda.synchronize()
    hold_up(torch.cuda.current_stream())
    found = [runner(x) for _ in range(25) for x in batches]
    for i, result in enumerate(found):
        assert_same(result, wanted[i % len(batches)])


def assert_streams_may_alternate(runner: Ask, batches: Sequence[Tensor], wanted: Sequence[ExitResult]) -> None:
    """Inputs come late on their own stream, are overwritten at once, and answers are used on that stream."""
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream(priority=-1), torch.cuda.default_stream()]
    found = []
    for i in range(60):
        x, stream = batches[i % len(batches)], streams[i % 3]
        with torch.cuda.stream(stream):
            late = torch.full_like(x, float("nan"))
            torch.cuda._sleep(200_000)
            late.copy_(x)
            result = runner(late)
            late.fill_(float("nan"))
            del late
            spoil()
            found.append(ExitResult(*(field.clone() for field in result)))
            del result
    for i, result in enumerate(found):
        assert_same(result, wanted[i % len(batches)])


def assert_host_does_not_wait(runner: Ask, x: Tensor, wanted: ExitResult) -> None:
    """A request returns while its stream is still held up."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        runner(x)
        stream.synchronize()
        torch.cuda._sleep(500_000_000)
        result = runner(x)
        assert not stream.query(), "the host has waited for the device"
    stream.synchronize()
    assert_same(result, wanted)
