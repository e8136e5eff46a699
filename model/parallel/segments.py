"""A backbone cut at its taps into segments, each a graph of ``torch.export``, and dealt to parts by their times.

Taps are forward hooks, by which a forward can be left early but not entered late. A stage of a pipeline begins in the
middle of the forward, so that here alone the backbone is traced. Heads are not: they read what a segment returns.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.export.passes import move_to_device_pass

from ..basics.bad_input import BadInput
from ..export.program import Stage as Segment
from ..export.program import cut_into_stages, one_line_of_exporter
from ..listening.taps import listening
from ..network.early_exit_network import EarlyExitNetwork
from ..trunk.trunk import Trunk

#: Before the names of a network's parameters, in those of segments.
NETWORK = "_network."


class _ReadByExits(nn.Module):
    """What each head reads and, last, the logits."""

    def __init__(self, network: EarlyExitNetwork, trunk: Trunk) -> None:
        super().__init__()
        self._network = network
        # the backbone itself keeps the names that it has in the network
        self._rewritten = None if trunk.module is network.backbone else trunk.module
        self._classifier, self._reading = trunk.classifier, trunk.reading

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        read: list[Tensor] = []
        module = self._network.backbone if self._rewritten is None else self._rewritten
        with listening(module, self._network.taps, lambda _, features: read.append(features), self._reading):
            out = module(x)
        return (*read, out if self._classifier is None else self._classifier.logits(out))


def check_cuttable(trunk: object) -> None:
    """Raise ``ValueError`` unless a backbone that is run so can be cut."""
    if trunk not in ("as_is", "cudnn"):
        raise ValueError(f"trunk: got {trunk!r}, wants 'as_is' or 'cudnn', which can be cut at the taps")


def segments_of(network: EarlyExitNetwork, trunk: Trunk, batch: Tensor, device: torch.device) -> list[Segment]:
    """Cut a trunk of a network's backbone behind each tap.

    Args:
        network: in eval mode, its taps checked.
        trunk: of its backbone, not a compiled one.
        batch: of the one size that segments take, on the network's device, lying in memory as the trunk wants it.
        device: of the segments; where it is the network's they share its parameters.

    Raises:
        BadInput: torch.export cannot trace the backbone, or it keeps a state.
    """
    with one_line_of_exporter("network: torch.export cannot trace its backbone, which is cut at its taps"):
        program = torch.export.export(_ReadByExits(network, trunk), (batch,)).run_decompositions({})
        written = program.graph_signature.buffers_to_mutate.values()
        if device != batch.device:
            program = move_to_device_pass(program, device)
    if written:
        name = sorted(written)[0].removeprefix(NETWORK)
        raise BadInput(f"network: a forward writes to {name!r}, wants none that does: segments keep no state")
    whole = program.module()
    assert isinstance(whole, torch.fx.GraphModule)
    return cut_into_stages(whole)


def run_segments(segments: Sequence[Segment], x: Tensor) -> list[tuple[Tensor, tuple[Tensor, ...]]]:
    """Return what each segment's exit reads of a micro-batch, and what the segment hands over."""
    handed: tuple[Tensor, ...] = (x,)
    found: list[tuple[Tensor, tuple[Tensor, ...]]] = []
    for segment in segments:
        read, *hands = segment.module(*handed)
        handed = tuple(hands)
        found.append((read, handed))
    return found


_WARM_UPS, _RUNS = 2, 5


def balanced(loads: Sequence[float], stages: int) -> list[int]:
    """Return the first segment of each stage, so that the largest sum of loads of one is as small as can be."""

    @cache
    def best(first: int, stages: int) -> tuple[float, tuple[int, ...]]:
        if stages == 1:
            return sum(loads[first:]), (first,)
        found = []
        for end in range(first + 1, len(loads) - stages + 2):
            later, starts = best(end, stages - 1)
            found.append((max(sum(loads[first:end]), later), (first, *starts)))
        return min(found)

    return [*best(0, stages)[1]]


def starts_of(name: str, ends: str | Sequence[str], taps: Sequence[str], parts: int, kind: str) -> list[int] | None:
    """Return the first segment of each part as an argument of that name says it; None if they are to be balanced.

    It is "auto", or the taps at which one part ends and the next begins. ``kind`` is what has a part each ("ranks").
    """
    if parts > len(taps) + 1:
        raise ValueError(f"{kind}: got {parts}, wants at most {len(taps) + 1}: the network has {len(taps)} taps")
    if isinstance(ends, str):
        if ends != "auto":
            raise ValueError(f"{name}: got {ends!r}, wants 'auto' or a list of taps")
        return None
    given = [*ends]
    if len(given) != parts - 1 or given != [tap for tap in taps if tap in given]:
        raise ValueError(f"{name}: got {given}, wants {parts - 1} of {[*taps]}, in this order, for {parts} {kind}")
    return [0, *(taps.index(tap) + 1 for tap in given)]


def median_ms(run: Callable[[], object]) -> float:
    """Measure what a run takes that the host waits for, in milliseconds."""
    times = []
    for _ in range(_WARM_UPS + _RUNS):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[_WARM_UPS:])
