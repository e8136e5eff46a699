"""Launches of a network's heads as its overlapped runner makes them, on what their taps gave them once."""

from collections.abc import Collection, Sequence

from torch import Tensor

from ..kernels import ExitBuffers, ExitHead, ExitLaunch


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
        ends: the last place of each launch beside the trunk; the exits behind share one more.
        which: places.
        with_probs: whether the answer has probabilities.
    """
    classes = next(head.weight.shape[0] for head in heads if head)
    samples, device = len(inputs[0]), inputs[0].device
    buffers = ExitBuffers.allocate(len(heads), samples, classes, with_probs=with_probs, device=device)
    starts = [0, *(end + 1 for end in ends)]
    launched = []
    for start, end in zip(starts, [*ends, len(heads) - 1], strict=True):
        if any(start <= place <= end for place in which):
            launched.append(ExitLaunch(buffers, start, heads[start : end + 1]))
            launched[-1](inputs[start : end + 1])
    return launched
