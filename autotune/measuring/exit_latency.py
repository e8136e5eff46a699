"""What a network's heads cost and what leaving early saves, eagerly and in CUDA graphs: the demo's latency table."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...model import EagerRunner, EarlyExitNetwork, ExitResult
from .timers import CAPTURES, captured, time_interleaved

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
        in_line(inputs[0])  # what is captured has run before
        beside(inputs[0])
        graphs = {name: captured(variants[name], inputs[0]) for name in (BACKBONE, IN_LINE, SIDE_STREAM)}
        modes = {EAGER: variants, GRAPH: graphs}
        for turn in range(max(CAPTURES, len(inputs))):  # every capture at least once
            x = inputs[turn % len(inputs)]
            for mode, compared in modes.items():
                for name, variant in compared.items():
                    if not _answers_alike(variant(x), network.backbone(x) if name == BACKBONE else in_line(x)):
                        raise RuntimeError(f"batch {batch}: {name!r} as {mode} does not answer as it should; not timed")
        for mode, compared in modes.items():
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


def _answers_alike(found: Any, wanted: Any) -> bool:
    """Compare exits and labels of results, or the classes that logits are largest for."""
    if isinstance(wanted, ExitResult):
        return torch.equal(found.label, wanted.label) and torch.equal(found.exit_index, wanted.exit_index)
    return torch.equal(found.argmax(dim=1), wanted.argmax(dim=1))
