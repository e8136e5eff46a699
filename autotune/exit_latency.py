"""What a network's heads cost and what leaving early saves, run eagerly: the demo's latency table."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..model import EagerRunner, EarlyExitNetwork
from .timing import time_interleaved

#: What is compared, in the order of the table.
BACKBONE = "backbone alone, no heads"
IN_LINE = "heads in line"
SIDE_STREAM = "heads on the side stream"
STOP = "side stream, stop once all are sure"


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
        For each batch size and variant: batch, variant, calls, and device_us and host_us with median, p20 and p80.

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
    rows = []
    for batch in batch_sizes:
        inputs = list(images[: len(images) // batch * batch].split(batch))[:32]
        if not inputs:
            continue
        for x in inputs:
            wanted = in_line(x)
            for name, answer in ((SIDE_STREAM, beside(x)), (STOP, beside(x, stop=True))):
                if not (torch.equal(answer.label, wanted.label) and torch.equal(answer.exit_index, wanted.exit_index)):
                    raise RuntimeError(f"batch {batch}: {name!r} does not answer as {IN_LINE!r} does; nothing is timed")
        for name, timing in time_interleaved(variants, inputs, rounds=rounds).items():
            rows.append(
                {
                    "batch": batch,
                    "variant": name,
                    "calls": timing.calls,
                    "device_us": timing.device._asdict(),
                    "host_us": timing.host._asdict(),
                }
            )
    return rows
