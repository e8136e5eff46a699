"""The question's own program, step by step: what the guide "From t1 + t2 to max(t1, t2)" shows."""

from collections.abc import Mapping

import torch
from auxhead.model.guides.steps import (
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
from auxhead.model.guides.steps import real_exits as guides_real_exits
from torch import Tensor, nn
from torchvision.models import ResNet

from .program import Made, Program, device, planted


def parts() -> tuple[ResNet, Mapping[str, nn.Module], Tensor]:
    """The same network, heads and images each time; on the CPU smaller ones."""
    on_gpu = torch.cuda.is_available()
    samples, pixels, dtype = (8, 224, torch.float16) if on_gpu else (2, 64, torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone, heads = make_parts(pixels)
        x = torch.randn(samples, 3, pixels, pixels)
    moved = {tap: head.to(device(), dtype).eval() for tap, head in heads.items()}
    return backbone.to(device(), dtype), moved, x.to(device(), dtype)


def made_of(step: type[InLine]) -> Made:
    backbone, heads, x = parts()
    return step(backbone, heads).eval(), x


def in_line() -> Made:
    return made_of(InLine)


def returning_early() -> Made:
    """Nobody is ever so sure, so that the host waits at every head."""
    step, x = made_of(ReturningEarly)
    step.threshold = 1.0
    return step, x


def independent() -> Made:
    return made_of(Independent)


def streams_left_out() -> Made:
    return made_of(StreamsLeftOut)


def stream_class() -> Made:
    return made_of(StreamClass)


def streams_right() -> Made:
    return made_of(StreamsRight)


def priorities() -> Made:
    return made_of(Priorities)


def graphs() -> Made:
    step, x = made_of(StreamsRight)
    return Graphs(step, x), x


def one_launch() -> Made:
    backbone, heads, x = parts()
    return one_launch_a_head(backbone, heads, x), x


def real_exits() -> Made:
    """All images leave at the second head: a confidence is above 0.0, and never above 1.0."""
    backbone, heads, x = parts()
    return guides_real_exits(backbone, heads, x, {tap: float(tap != TAPS[1]) for tap in TAPS}), x


PROGRAMS: dict[str, Program] = {
    "in_line": planted(in_line, "fusible-heads", "launch-bound", needs_cuda=False),
    "returning_early": planted(
        returning_early, "host-wait", may_find=("launch-bound", "fusible-heads", "gate-waits"), needs_cuda=False
    ),
    "independent": planted(independent, "fusible-heads", "launch-bound", needs_cuda=False),
    "streams_left_out": planted(streams_left_out, "default-stream", may_find=("launch-bound", "fusible-heads")),
    "streams_class": planted(
        stream_class,
        "stream-class",
        may_find=(
            *("race", "freed-in-use", "default-stream", "priority"),
            *("allocation", "launch-bound", "fusible-heads", "full-device"),
        ),
    ),
    "streams_right": planted(streams_right, "launch-bound", may_find=("priority", "fusible-heads", "full-device")),
    "priorities": planted(priorities, "launch-bound", may_find=("fusible-heads", "full-device")),
    "graphs": planted(graphs, "fusible-heads", may_find=("full-device",)),
    "one_launch_a_head": Program(one_launch),
    "real_exits": Program(real_exits),
}
