"""Captures parts of a network on their GPUs, for each batch size, and the times of segments that decide how."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ....kernels import ExitBuffers
from ....kernels.memory_pool import MemoryPool, empty_cache
from ...early_exit_network import EarlyExitNetwork
from ...runners.capture import Capture, warm_up
from ...runners.captured_batch import StaticInput
from ...runners.overlapped import forks_by_rule
from ...runners.polled import stops_by_rule
from ...runners.segment_times import measure_segments
from ...taps import list_taps
from ..segments import Segment
from .captured import CapturedParts
from .graphs import PartGraphs
from .part import Part
from .streams import PartStreams


def graph_times(network: EarlyExitNetwork, segments: Sequence[Segment], x: Tensor, streams: PartStreams) -> list[float]:
    """Measure what each segment takes for a batch, as a graph without heads, in microseconds.

    All are run on the device of ``streams``, where the batch, the segments and the network are.
    """
    static = StaticInput(x)

    def forward(cut: Callable[[], None]) -> None:
        handed: Sequence[Tensor] = (static.x,)
        for index, segment in enumerate(segments):
            if index > 0:
                cut()
            _, *handed = segment.module(*handed)

    warm_up(lambda: forward(lambda: None), lambda: None, streams.trunk)
    capture = Capture(streams.device, MemoryPool(streams.device))
    with capture.capturing(streams.trunk, network):
        forward(capture.cut)
    times = measure_segments(capture.graphs, static.refill, streams.trunk)
    capture.graphs.clear()
    empty_cache()  # of their pool: the runs before the next capture take memory, too
    return times


def forks_of(part: Part, segment_us: Sequence[float], size: int, classes: int, *, polls: bool) -> list[int]:
    """Return after which of a part's segments a launch of heads leaves the trunk, by times of all segments.

    Where the host does not ask, nothing is gained by it but in the last part: heads of others run behind their trunk,
    while the next part's device is busy.
    """
    own = segment_us[part.start : part.end]
    if polls:
        return stops_by_rule(own)
    return forks_by_rule(own, size, classes) if part.is_last else []


def capture_parts(
    network: EarlyExitNetwork,
    parts: Sequence[Part],
    streams: Sequence[PartStreams],
    x: Tensor,
    segment_us: Sequence[float],
    *,
    polls: bool,
) -> CapturedParts:
    """Capture all parts for batches like the example, one after the other, each with what the one before hands over."""
    size, heads = len(x), network.exit_heads
    classes, places = heads[0].num_classes, len(heads) + 1
    with_probs = all(head.return_probs for head in heads)
    forks = [forks_of(part, segment_us, size, classes, polls=polls) for part in parts]
    stops = sum(len(each) + 1 for each in forks) - 1
    open_samples = torch.zeros(stops, dtype=torch.int64, device="cpu").pin_memory() if polls else None
    static = StaticInput(x)
    taken, captured, first_stop = [static.x], [], 0
    for part, own, of_part in zip(parts, streams, forks, strict=True):
        with torch.cuda.device(part.device):
            monitor = network.monitor
            buffers = ExitBuffers.allocate(
                places, size, classes, with_probs=with_probs, device=part.device,
                tallies=None if monitor is None else monitor.tallies_on(part.device, places),
            )  # fmt: skip
            told = None if open_samples is None else open_samples[first_stop : first_stop + len(of_part) + 1]
            with part.choosing(size):
                captured.append(PartGraphs(own, size, taken, buffers, of_part, told))
            first_stop += len(of_part) + 1
            if not part.is_last:
                handed = captured[-1].run_once()
                following = parts[part.number + 1].device
                taken = [torch.empty_like(each, device=following).copy_(each) for each in handed]
                torch.cuda.current_stream(part.device).synchronize()
        if not part.is_last:
            torch.cuda.current_stream(following).synchronize()
    patient = any(head.rule.criterion == "patience" for head in heads)
    said = [_described(part, of_part, network.taps) for part, of_part in zip(parts, forks, strict=True)]
    return CapturedParts(static, captured, open_samples, f"{'; '.join(said)}.", patient=patient)


def _described(part: Part, forks: Sequence[int], taps: Sequence[str]) -> str:
    beside = list_taps([part.start + fork for fork in forks], taps)
    last = "with the classifier" if part.is_last else "behind the trunk"
    return f"{part.device}: heads beside the trunk after {beside}, the others {last}"
