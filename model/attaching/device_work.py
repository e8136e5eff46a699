"""``measured_work``: when each of some layers returns, as a share of what a forward takes on a CUDA device."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from ...kernels.cuda_runtime import beside_captures
from ..batches import Batch, call_with, first_tensor, map_tensors
from ..hooks import ThreadHook

_WARM_UP, _TIMED = 3, 5
#: Cycles for which the device is kept busy first, about 50 ms, so that it does not wait for Python in between.
_HELD_UP = 100_000_000


def measured_work(model: nn.Module, layers: Sequence[str], x: Batch) -> list[float]:
    """Run a model a few times in eval mode, and return how far it is, from 0 to 1, when each layer returns.

    Args:
        model: on a CUDA device.
        layers: names of layers that run once.
        x: a batch of the size that will be run.
    """
    shares: list[list[float]] = []
    with ExitStack() as stack, torch.cuda.device(first_tensor(x).device):
        stack.enter_context(beside_captures())  # which the host must not wait beside otherwise
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        stack.enter_context(torch.no_grad())
        marks = [torch.cuda.Event(enable_timing=True) for _ in layers]
        for name, mark in zip(layers, marks, strict=True):
            hook = ThreadHook(partial(_record, mark))
            stack.callback(model.get_submodule(name).register_forward_hook(hook).remove)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for turn in range(_WARM_UP + _TIMED):
            batch = map_tensors(x, torch.clone)  # which the model may change in place
            torch.cuda._sleep(_HELD_UP if turn >= _WARM_UP else 0)
            began.record()
            call_with(model, batch)
            ended.record()
            ended.synchronize()
            if turn >= _WARM_UP:
                total = began.elapsed_time(ended)
                shares.append([began.elapsed_time(mark) / total for mark in marks])
    return [median(each) for each in zip(*shares, strict=True)]


def _record(mark: torch.cuda.Event, *_of_the_layer: Any) -> None:
    mark.record()
