"""``PackedRunner``: answers for batches of several tensors by runners that take one, of each length of its tokens."""

import copy
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..answers.exit_result import ExitResult
from ..basics.arguments import kind_of
from ..listening.batches import Batch, arguments_in, check_input_batch, first_tensor, map_tensors
from ..listening.packing import Packing, taking_rows
from ..listening.reading import PADDING, TOKENS, masks_in
from ..network.early_exit_network import EarlyExitNetwork
from .runner import Runner


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
        self._lengths = None if lengths is None else _checked(lengths)
        network.check_taps(example_input)
        self.network = network
        self._device = first_tensor(example_input).device
        self._packings: list[Packing] = []
        self.runners: list[Runner] = []
        """One for each length, in their order; or the one that there is."""
        try:
            for length in self._lengths or (None,):
                example = example_input if length is None else self._of_length(length, "example_input", example_input)
                packing = Packing("example_input", example)
                self._packings.append(packing)
                self.runners.append(make(_taking_rows(network, packing), packing.pack(example, self._device)))
        except BaseException:
            self.close()
            raise

    def __call__(self, x: Batch) -> ExitResult:
        """Answer for a batch like the example, of any number of samples and, with lengths, up to the longest.

        It may be on the CPU or on the device of the example, and each tensor on either; one in pinned memory may be
        written to once this has returned.

        Raises:
            ValueError, TypeError: a tensor or constant that is not like the example's; nothing is launched.
            RuntimeError: as of the runner behind it.
        """
        index = 0
        if self._lengths is not None:
            tokens = _mask("x", x, self.network)[1].shape[1]
            index = bisect_left(self._lengths, tokens)
            if index == len(self._lengths):
                raise ValueError(f"x: has {tokens} tokens, wants at most {self._lengths[-1]}, the longest of lengths")
            x = self._of_length(self._lengths[index], "x", x)
        return self.runners[index](self._packings[index].pack(x, self._device))

    def _of_length(self, length: int, name: str, x: Batch) -> Batch:
        """Return a batch with so many tokens: padded behind its own, or the first ones."""
        which, mask = _mask(name, x, self.network)
        return map_tensors(x, partial(_resized, length, mask, int(which.endswith(PADDING))))

    def describe(self) -> str:
        """Say how batches come in, and what was made of the network, for each length."""
        lines = ["Batches of several tensors come in as one, a row of bytes a sample."]
        for length, runner in zip(self._lengths or (None,), self.runners, strict=True):
            lines += [*([] if length is None else [f"Up to {length} tokens:"]), runner.describe()]
        return "\n".join(lines)

    def refresh(self) -> None:
        """Take over parameters of the backbone that were changed in place, where runners hold copies of them."""
        for runner in self.runners:
            runner.refresh()

    def close(self) -> None:
        """Free what is held; closing twice is fine."""
        for runner in self.runners:
            runner.check_closable()
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
    if isinstance(lengths, str) or not found or not all(type(each) is int and each > 0 for each in found):
        raise ValueError(f"lengths: got {lengths!r:.50}, wants numbers of tokens, positive ints")
    return found


def _mask(name: str, x: Any, network: EarlyExitNetwork) -> tuple[str, Tensor]:
    """Return name and tensor [N, T] of the mask that tells padding in a batch."""
    if not isinstance(x, (tuple, Mapping)):
        raise TypeError(f"{name}: got {kind_of(x)}, wants a tuple or dict of the backbone's arguments with a mask")
    masks = masks_in(arguments_in(x, network.argument_names))
    if len(masks) != 1:
        wants = f"one [N, T] whose name ends in {TOKENS!r} or {PADDING!r}, which lengths are padded by"
        raise ValueError(f"{name}: got {len(masks)} masks, wants {wants}")
    return masks[0]


def _resized(length: int, mask: Tensor, padding: int, each: Tensor) -> Tensor:
    """Return a tensor of a batch with so many tokens, if it has one number, or several, for each token of the mask."""
    tokens = mask.shape[1]
    if each.ndim < 2 or each.shape[1] != tokens or tokens == length:
        return each
    if tokens > length:
        return each[:, :length]
    more = each.new_full((len(each), length - tokens, *each.shape[2:]), padding if each is mask else 0)
    return torch.cat([each, more], 1)


def _taking_rows(network: EarlyExitNetwork, packing: Packing) -> EarlyExitNetwork:
    """Return the network with a backbone that takes rows, and reading that finds masks in them; all else is shared."""
    taking = copy.copy(network)
    taking._modules = {**network._modules, "backbone": taking_rows(network.backbone, packing)}
    taking.forget_repeats()
    taking.reading = network.reading_for_rows(packing)
    return taking
