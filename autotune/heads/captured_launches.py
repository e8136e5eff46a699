"""Launches of a network's heads as its overlapped runner makes them, on what their taps gave them once."""

from collections.abc import Collection, Sequence

from torch import Tensor

from ...kernels import ExitBuffers, ExitHead, ExitLaunch


def head_launches(
    buffers: ExitBuffers, heads: Sequence[ExitHead | None], ends: Sequence[int]
) -> list[tuple[slice, ExitLaunch]]:
    """Return the launches that serve heads from place 0 on, and the places of each; nothing is launched yet.

    Args:
        buffers: of the network.
        heads: of its exits, or of the first ones; None is a classifier whose logits are given.
        ends: the last place of each launch beside the trunk; the exits behind share one more.
    """
    starts = [0, *(end + 1 for end in ends)]
    places = [slice(start, end + 1) for start, end in zip(starts, [*ends, len(heads) - 1], strict=True)]
    return [(part, ExitLaunch(buffers, part.start, heads[part])) for part in places if heads[part]]


def launch_heads(
    heads: Sequence[ExitHead | None],
    inputs: Sequence[Tensor],
    ends: Sequence[int],
    which: Collection[int],
    *,
    with_probs: bool,
) -> list[ExitLaunch]:
    """Launch, on the current stream, all launches that an exit of some places has a part in; return these.

    Args:
        heads: of all exits, the classifier's last; None is one whose logits are given.
        inputs: what each gets; see :class:`~auxhead.kernels.ExitLaunch`.
        ends: see ``head_launches``.
        which: places.
        with_probs: whether the answer has probabilities.
    """
    classes = next(head.weight.shape[0] for head in heads if head)
    samples, device = len(inputs[0]), inputs[0].device
    buffers = ExitBuffers.allocate(len(heads), samples, classes, with_probs=with_probs, device=device)
    launched = []
    for part, launch in head_launches(buffers, heads, ends):
        if any(part.start <= place < part.stop for place in which):
            launch(inputs[part])
            launched.append(launch)
    return launched
