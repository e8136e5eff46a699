"""``read_in_equilibrium``: scales the gradients of exits where they meet in the backbone, which gets their mean."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..listening.reading import parts_in_words


def read_in_equilibrium(taps: Sequence[str], outputs: Sequence[Any], reads: Sequence[Tensor]) -> list[Tensor]:
    """Scale gradients of exits as they flow into the backbone, and return what the heads read, of the same numbers.

    Gradient equilibrium (Li et al., "Improved Techniques for Training Adaptive Deep Networks", ICCV 2019,
    arXiv:1908.06294): at the i-th of k exits, from 1, the gradient of the exit is scaled by 1 / (k - i + 1), and that
    of all that is behind it by (k - i) / (k - i + 1). So each layer gets the mean of the gradients of the exits behind
    it, where it has their sum otherwise, if all of it flows through the taps. Gradients of the heads' own parameters
    stay as they are.

    Args:
        taps: the names of the taps; k is one more.
        outputs: what each tapped layer has returned in this forward, a tensor or what holds some.
        reads: what each head reads of that, itself or made of it.

    Raises:
        ValueError: a tap whose output is of a kind of which nobody knows where its tensors are.
    """
    behind = {}  # exits behind a tensor; of one that several taps return, those behind the last of them
    for index, (tap, output, y) in enumerate(zip(taps, outputs, reads, strict=True)):
        found = {id(one): one for one in tree_leaves(output) if isinstance(one, Tensor) and one.requires_grad}
        if y.requires_grad and not found:
            raise ValueError(
                f"gradients: the output of layer {tap!r} is {parts_in_words(output)}, in which no tensor is found for "
                "'equilibrium'; wants a tap that returns a tensor, a tuple or a dict, or 'equal'"
            )
        exits = len(taps) - index
        for key, one in found.items():
            if len(found) > 1 and _is_made_of(one, found.values()):  # whose gradient comes by it, and is scaled there
                continue
            one.register_hook(partial(_times, exits / (exits + 1)))  # of the sum: of this exit and all behind it
            behind[key] = exits
    scaled = []
    for output, y in zip(outputs, reads, strict=True):
        exits = min((behind[id(one)] for one in tree_leaves(output) if id(one) in behind), default=1)
        if y.requires_grad and exits > 1:
            y = y.view_as(y)
            y.register_hook(partial(_times, 1.0 / exits))
        scaled.append(y)
    return scaled


def _is_made_of(one: Tensor, others: Iterable[Tensor]) -> bool:
    sources = {each.grad_fn for each in others if each is not one}
    ahead, seen = [one.grad_fn], set()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(before in sources for before, _ in node.next_functions):
            return True
        ahead += [before for before, _ in node.next_functions]
    return False


def _times(factor: float, gradient: Tensor) -> Tensor:
    return gradient * factor
