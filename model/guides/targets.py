"""The steps of "From t1 + t2 to max(t1, t2)" as targets of the doctor: ``auxhead.model.guides.targets:in_line``.

Each function returns a step and its images: in half precision on a GPU, smaller ones in single precision elsewhere.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torchvision.models import ResNet

from .steps import (
    TAPS,
    Graphs,
    Independent,
    InLine,
    Priorities,
    ReturningEarly,
    StreamClass,
    StreamsLeftOut,
    StreamsRight,
    make_parts,
    one_launch_a_head,
)
from .steps import real_exits as with_real_exits
from .steps import shorter_trunk as with_shorter_trunk

#: What a factory returns: something to call, and its input.
Target = tuple[Callable[[Any], Any], Tensor]
Step = TypeVar("Step", bound=InLine)


def parts() -> tuple[ResNet, Mapping[str, nn.Module], Tensor]:
    """The same network, heads and images each time; on the CPU smaller ones."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    samples, pixels, dtype = (8, 224, torch.float16) if on_gpu else (2, 64, torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone, heads = make_parts(pixels)
        x = torch.randn(samples, 3, pixels, pixels)
    moved = {tap: head.to(device, dtype).eval() for tap, head in heads.items()}
    return backbone.to(device, dtype), moved, x.to(device, dtype)


def _made_of(step: type[Step]) -> tuple[Step, Tensor]:
    backbone, heads, x = parts()
    return step(backbone, heads).eval(), x


def _graph_of(step: type[InLine]) -> Target:
    made, x = _made_of(step)
    return Graphs(made, x), x


#: Steps 1, 3, 4 (wrong, and wrong in another way), 5 and 6.
in_line, independent, streams_left_out, stream_class, streams_right, priorities = (
    partial(_made_of, step) for step in (InLine, Independent, StreamsLeftOut, StreamClass, StreamsRight, Priorities)
)
#: A graph of step 1, and step 7, one of step 5.
graph_in_line, graphs = partial(_graph_of, InLine), partial(_graph_of, StreamsRight)


def returning_early() -> Target:
    """Return step 2. Nobody is ever so sure, so that the host waits at every head."""
    step, x = _made_of(ReturningEarly)
    step.threshold = 1.0
    return step, x


def one_launch() -> Target:
    """Return step 8."""
    backbone, heads, x = parts()
    return one_launch_a_head(backbone, heads, x), x


def shorter_trunk() -> Target:
    """Return step 9."""
    backbone, heads, x = parts()
    return with_shorter_trunk(backbone, heads, x), x


def real_exits() -> Target:
    """Return step 10. All images leave at the second head: a confidence is above 0.0, and never above 1.0."""
    backbone, heads, x = parts()
    return with_real_exits(backbone, heads, x, {tap: float(tap != TAPS[1]) for tap in TAPS}), x
