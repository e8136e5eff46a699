"""Launches of a network's heads as its overlapped runner makes them, on inputs that their taps gave once."""

from collections.abc import Collection, Sequence

from torch import Tensor

from ...kernels import ExitBuffers, ExitHead, ExitLaunch


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
    heads: Sequence[ExitHead | None],
    inputs: Sequence[Tensor],
    ends: Sequence[int],
    exits: Collection[int],
    *,
    with_probs: bool,
) -> list[ExitLaunch]:
    """Launch, on the current stream, all launches that one of ``exits`` has a part in; return these.

    Args:
        heads: see ``head_launches``; of all exits.
        inputs: what each gets; see :class:`~auxhead.kernels.ExitLaunch`.
        ends: see ``head_launches``.
        exits: indices.
        with_probs: whether the answer has probabilities.
    """
    classes = next(head.weight.shape[0] for head in heads if head)
    samples, device = len(inputs[0]), inputs[0].device
    buffers = ExitBuffers.allocate(len(heads), samples, classes, with_probs=with_probs, device=device)
    launched = []
    for part, launch in head_launches(buffers, heads, ends):
        if any(part.start <= index < part.stop for index in exits):
            launch(inputs[part])
            launched.append(launch)
    return launched
