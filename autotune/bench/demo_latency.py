"""The demo's latency table: the cost of a network's heads and the gain of leaving early, eagerly and in CUDA graphs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...model import EagerRunner, EarlyExitNetwork, ExitResult
from ..measuring.captured import CapturedFunction
from ..measuring.timers import CAPTURES, time_captures
from ..records.summaries import percentiles

#: The variants, in the order of the table.
BACKBONE = "no heads"
HEADS = "with heads"
STOP = "stop once all are sure"
#: The modes: launch by launch from Python, or replayed from a CUDA graph, which the host cannot leave half-way.
EAGER = "eager"
GRAPH = "CUDA graph"

_Call = Callable[[Tensor], object]


@torch.inference_mode()
def demo_latency(
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
    runner = EagerRunner(network)
    heads, stop = (partial(runner, stop=stops) for stops in (False, True))
    variants: dict[str, _Call] = {BACKBONE: network.backbone, HEADS: heads, STOP: stop}
    rows: list[dict[str, Any]] = []
    for batch in batch_sizes:
        if len(images) < batch:
            continue
        inputs = list(images[: len(images) // batch * batch].split(batch))[:32]
        graphs = {name: [_captured(variants[name], inputs[0]) for _ in range(CAPTURES)] for name in (BACKBONE, HEADS)}
        modes = {EAGER: {name: [call] for name, call in variants.items()}, GRAPH: graphs}
        for x in inputs:
            logits, answer = network.backbone(x), runner(x)
            for mode, compared in modes.items():
                for name, calls in compared.items():
                    wanted = logits if name == BACKBONE else answer
                    if not all(_answers_alike(call(x), wanted) for call in calls):
                        raise RuntimeError(f"batch {batch}: {name!r} as {mode} does not answer as it should; not timed")
        for mode, compared in modes.items():
            for name, samples in time_captures(compared, inputs, rounds=rounds, warm_up=10, repeat=1).items():
                times = {"device_us": samples.device, "host_us": samples.host}
                rows.append(
                    {"batch": batch, "mode": mode, "variant": name, "calls": rounds}
                    | {
                        kind: percentiles([us for own in taken for us in own])._asdict()
                        for kind, taken in times.items()
                    }
                )
    return rows


def _captured(function: _Call, example: Tensor) -> _Call:
    return CapturedFunction(function, example, stream=torch.cuda.Stream(example.device, priority=-1))


def _answers_alike(found: Any, wanted: Any) -> bool:
    """Compare exits and labels of results, or the classes that logits are largest for."""
    if isinstance(wanted, ExitResult):
        return torch.equal(found.label, wanted.label) and torch.equal(found.exit_index, wanted.exit_index)
    return torch.equal(found.argmax(dim=1), wanted.argmax(dim=1))
