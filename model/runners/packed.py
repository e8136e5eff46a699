"""``PackedRunner``: answers for batches of several tensors by runners that take one, of each length of its tokens."""

import copy
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..answers.exit_result import ExitResult
from ..basics.arguments import check_mode, kind_of
from ..listening.batches import Batch, check_input_batch, first_tensor, tensors_by_name
from ..listening.packing import Packing, Padding, check_takes_rows, taking_rows
from ..listening.reading import PADDING, TOKENS, are_tokens
from ..listening.rounding import relative_error
from ..network.early_exit_network import EarlyExitNetwork
from .runner import Runner

#: How far logits may be off where padding is added, in roundings of the largest: sums come in another order.
_ROUNDINGS = 100


class PackedRunner(Runner):
    """Runs a network of several inputs: each request is packed into rows of bytes, which a runner takes as one input.

    What is no tensor is fixed by the example. With lengths there is a runner for each, and a request is padded to the
    next one where its mask tells padding, so that graphs of a few sizes answer for all.
    """

    def __init__(
        self,
        network: EarlyExitNetwork,
        example_input: Batch,
        make: Callable[[EarlyExitNetwork, Tensor], Runner],
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Make runners, by ``make``, of a network that takes rows, and rows of the example; see :func:`make_runner`."""
        check_input_batch("example_input", example_input)
        network.check_taps(example_input)
        self.network = network
        self._device = first_tensor(example_input).device
        self._lengths = [0] if lengths is None else _checked(lengths)
        paddings = [None] if lengths is None else _paddings(network, example_input, self._lengths)
        self._packings = [Packing("example_input", example_input, padding) for padding in paddings]
        self.runners: list[Runner] = []
        """One for each length, in their order; or the one that there is."""
        leaves = self._packings[0].leaves(example_input)
        try:
            for packing in self._packings:
                self.runners.append(make(_taking_rows(network, packing), packing.pack(leaves, self._device)))
        except BaseException:
            self.close()
            raise

    def __call__(self, x: Batch, **options: Any) -> ExitResult:
        """Answer for a batch like the example, of any number of samples and, with lengths, up to the longest.

        It may be on the CPU or on the device of the example, and each tensor on either; one in pinned memory may be
        written to once this has returned. Options are those of the runner behind it.

        Raises:
            ValueError, TypeError: a tensor or constant that is not like the example's; nothing is launched.
            RuntimeError: as of the runner behind it.
        """
        check_takes_rows(self.network.backbone)
        leaves, index = self._packings[0].leaves(x), 0
        if self._lengths[-1]:
            tokens = self._packings[0].tokens_of(leaves)
            if not 0 < tokens <= self._lengths[-1]:
                raise ValueError(f"x: has {tokens} tokens, wants 1 to {self._lengths[-1]}, the longest of lengths")
            index = bisect_left(self._lengths, tokens)
        return self.runners[index](self._packings[index].pack(leaves, self._device), **options)

    def describe(self) -> str:
        """Say how batches come in, and what was made of the network, for each length."""
        lines = ["Batches of several tensors come in as one, a row of bytes a sample."]
        for length, runner in zip(self._lengths, self.runners, strict=True):
            lines += [*([f"Up to {length} tokens:"] if length else []), runner.describe()]
        return "\n".join(lines)

    def refresh(self) -> None:
        """Take over parameters of the backbone that were changed in place, where runners hold copies of them."""
        for runner in self.runners:
            runner.refresh()

    def close(self) -> None:
        """Free what is held; closing twice is fine."""
        self.check_closable()
        for runner in self.runners:
            runner.close()

    def check_closable(self) -> None:
        """Raise what :meth:`close` would raise now."""
        for runner in self.runners:
            runner.check_closable()

    def wait_until_idle(self) -> None:
        """Let the host wait for what was launched on streams that no caller can wait for."""
        for runner in self.runners:
            runner.wait_until_idle()


def _checked(lengths: Sequence[int]) -> list[int]:
    try:
        found = sorted(set(lengths))
    except TypeError:
        found = []
    if isinstance(lengths, str) or not found or any(type(one) is not int or one < 1 for one in found):
        raise ValueError(f"lengths: got {lengths!r:.50}, wants numbers of tokens, positive ints")
    return found


@torch.no_grad()
def _paddings(network: EarlyExitNetwork, example: Batch, lengths: Sequence[int]) -> list[Padding]:
    """Find out what is in the padding of an example, and that no logits of it change with more; raise if they do."""
    if not isinstance(example, (tuple, Mapping)):
        wants = "a tuple or dict of the backbone's arguments with a mask"
        raise TypeError(f"example_input: got {kind_of(example)}, wants {wants}")
    if (found := network.mask_in(example)) is None:
        wants = f"one [N, T] by which heads read, or whose name ends in {TOKENS!r} or {PADDING!r}"
        raise ValueError(f"example_input: lengths are padded by a mask, wants {wants}")
    check_mode(network)
    name, mask = found
    kept, place = are_tokens(name, mask), ""
    fills: dict[str, bool | int | float] = {}
    for own, each in tensors_by_name(example).items():
        if each.shape[:2] == kept.shape:
            place, padding = own if each is mask else place, each[~kept].unique()
            by_name = name.endswith(PADDING) != name.startswith("~") and each is mask
            fills[own] = padding.item() if padding.numel() == 1 else int(by_name)
    # what is compared has to be padded: the example, or all but its last tokens
    short, longest = min(mask.shape[1], max(1, lengths[-1] - 1)), lengths[-1]
    batches: list[Batch] = []
    for length in (short, longest):
        packing = Packing("example_input", example, Padding(length, place, fills))
        batches.append(packing.unpack(packing.pack(packing.leaves(batches[0] if batches else example), mask.device)))
    before, padded = map(network.logits, batches)
    allowed = _ROUNDINGS * torch.finfo(before[-1].dtype).eps
    for exit_name, one, other in zip([*network.taps, "the classifier"], before, padded, strict=True):
        if not (off := relative_error([other], [one.double()])) <= allowed:
            raise ValueError(
                f"lengths: logits of {exit_name} change by {off:.2g} of the largest where the example is padded to "
                f"{longest} tokens; wants layers and heads that leave padding out, and an example that is padded "
                "as requests are, with another number of tokens than of anything else in it"
            )
    return [Padding(length, place, fills) for length in lengths]


def _taking_rows(network: EarlyExitNetwork, packing: Packing) -> EarlyExitNetwork:
    """Return the network with a backbone that takes rows, and reading that finds masks in them; all else is shared."""
    taking = copy.copy(network)
    taking._modules = {**network._modules, "backbone": taking_rows(network.backbone, packing)}
    taking.reading = network.reading_for_rows(packing)
    return taking
