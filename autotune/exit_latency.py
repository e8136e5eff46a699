"""What a network's heads cost and what leaving early saves, run eagerly: the demo's latency table."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..model import EagerRunner, EarlyExitNetwork
from .timing import captured, time_interleaved

#: What is compared, in the order of the table.
BACKBONE = "no heads"
IN_LINE = "heads in line"
SIDE_STREAM = "heads on the side stream"
STOP = "stop once all are sure"
#: How: launch by launch from Python, or replayed from a CUDA graph, which the host cannot leave half-way.
EAGER = "eager"
GRAPH = "CUDA graph"


@torch.inference_mode()
def exit_latency(
    network: EarlyExitNetwork, images: Tensor, batch_sizes: Sequence[int] = (1, 64), *, rounds: int = 100
) -> list[dict[str, Any]]:
    """Time a calibrated network on a CUDA device; batches are cut from ``images``, up to 32 different ones a size.

    Args:
        network: in eval mode, rules set.
        images: [M, 3, H, W], the network's input, on its device.
        batch_sizes: those larger than M are left out.
        rounds: timed calls of each variant.

    Returns:
        For each batch size, mode and variant: batch, mode, variant, calls, and device_us and host_us with median, p20
        and p80.

    Raises:
        RuntimeError: the variants do not answer alike, sample by sample; nothing is timed then.
    """
    in_line, beside = EagerRunner(network, in_line=True), EagerRunner(network)
    variants: dict[str, Callable[[Tensor], object]] = {
        BACKBONE: network.backbone,
        IN_LINE: in_line,
        SIDE_STREAM: beside,
        STOP: lambda x: beside(x, stop=True),
    }
    rows: list[dict[str, Any]] = []
    for batch in batch_sizes:
        if len(images) < batch:
            continue
        inputs = list(images[: len(images) // batch * batch].split(batch))[:32]
        for x in inputs:
            wanted = in_line(x)
            for name, answer in ((SIDE_STREAM, beside(x)), (STOP, beside(x, stop=True))):
                if not (torch.equal(answer.label, wanted.label) and torch.equal(answer.exit_index, wanted.exit_index)):
                    raise RuntimeError(f"batch {batch}: {name!r} does not answer as {IN_LINE!r} does; nothing is timed")
        graphs = {name: captured(variants[name], inputs[0]) for name in (BACKBONE, IN_LINE, SIDE_STREAM)}
        for mode, compared in ((EAGER, variants), (GRAPH, graphs)):
            for name, timing in time_interleaved(compared, inputs, rounds=rounds).items():
                rows.append(
                    {
                        "batch": batch,
                        "mode": mode,
                        "variant": name,
                        "calls": timing.calls,
                        "device_us": timing.device._asdict(),
                        "host_us": timing.host._asdict(),
                    }
                )
    return rows
