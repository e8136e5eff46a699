"""Launches of a network's heads as its overlapped runner makes them, on inputs that their taps gave once."""

from collections.abc import Collection, Sequence

from torch import Tensor

from ...kernels import ExitBuffers, ExitHead, ExitLaunch
from .alone import AloneHead


def head_launches(
    buffers: ExitBuffers, heads: Sequence[ExitHead | None], ends: Sequence[int]
) -> list[tuple[slice, ExitLaunch]]:
    """Return the launches that serve all heads, and the exits of each; nothing is launched yet.

    Args:
        buffers: of the network.
        heads: of its exits, or of the first ones; None is a classifier whose logits are given.
        ends: index of the last exit of each launch beside the trunk; the exits behind share one more.
    """
    starts = [0, *(end + 1 for end in ends)]
    exits = [slice(start, end + 1) for start, end in zip(starts, [*ends, len(heads) - 1], strict=True)]
    return [(part, ExitLaunch(buffers, part.start, heads[part])) for part in exits if heads[part]]


def launch_heads(
    exits: Sequence[AloneHead | Tensor], ends: Sequence[int], launched: Collection[int]
) -> list[ExitLaunch]:
    """Launch, on the current stream, all launches that one of some exits has a part in; return these.

    Args:
        exits: the heads with their inputs; last the classifier, or the logits [N, K] that it gives.
        ends: see ``head_launches``.
        launched: indices of exits.
    """
    heads = [one.head.as_exit_head() if isinstance(one, AloneHead) else None for one in exits]
    inputs = [one.x if isinstance(one, AloneHead) else one for one in exits]
    with_probs = all(one.head.return_probs for one in exits[:-1] if isinstance(one, AloneHead))
    classes = next(one.head.num_classes for one in exits if isinstance(one, AloneHead))
    samples, device = len(inputs[0]), inputs[0].device
    buffers = ExitBuffers.allocate(len(heads), samples, classes, with_probs=with_probs, device=device)
    made = []
    for part, launch in head_launches(buffers, heads, ends):
        if any(part.start <= index < part.stop for index in launched):
            launch(inputs[part])
            made.append(launch)
    return made
