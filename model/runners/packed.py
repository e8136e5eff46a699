"""``PackedRunner``: answers for batches of several tensors by runners that take one, of each length of its tokens."""

import copy
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..answers.exit_result import ExitResult
from ..basics.arguments import kind_of
from ..listening.batches import Batch, check_input_batch, first_tensor, map_tensors, tensors_by_name
from ..listening.packing import Packing, check_takes_rows, taking_rows
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
        self._padding = None if lengths is None else _Padding(network, example_input, lengths)
        self._packings: list[Packing] = []
        self.runners: list[Runner] = []
        """One for each length, in their order; or the one that there is."""
        try:
            for length in self._lengths:
                example = example_input if self._padding is None else self._padding.to(length, example_input)
                packing = Packing("example_input", example)
                self._packings.append(packing)
                self.runners.append(make(_taking_rows(network, packing), packing.pack(example, self._device)))
        except BaseException:
            self.close()
            raise

    @property
    def _lengths(self) -> Sequence[int]:
        return (0,) if self._padding is None else self._padding.lengths

    def __call__(self, x: Batch, **options: Any) -> ExitResult:
        """Answer for a batch like the example, of any number of samples and, with lengths, up to the longest.

        It may be on the CPU or on the device of the example, and each tensor on either; one in pinned memory may be
        written to once this has returned. Options are those of the runner behind it.

        Raises:
            ValueError, TypeError: a tensor or constant that is not like the example's; nothing is launched.
            RuntimeError: as of the runner behind it.
        """
        check_takes_rows(self.network.backbone)
        index = 0
        if self._padding is not None:
            index = self._padding.length_of(x)
            x = self._padding.to(self._lengths[index], x)
        return self.runners[index](self._packings[index].pack(x, self._device), **options)

    def describe(self) -> str:
        """Say how batches come in, and what was made of the network, for each length."""
        lines = ["Batches of several tensors come in as one, a row of bytes a sample."]
        for length, runner in zip(self._lengths, self.runners, strict=True):
            lines += [*([] if self._padding is None else [f"Up to {length} tokens:"]), runner.describe()]
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


class _Padding:
    """Pads batches to some lengths as an example is padded: by its mask, in what has a row for each of its tokens."""

    def __init__(self, network: EarlyExitNetwork, example: Batch, lengths: Sequence[int]) -> None:
        """Find out what padding is in each tensor, and that no logits change with it.

        Raises:
            ValueError, TypeError: lengths that are none, or an example without one mask; or logits that do change.
        """
        try:
            self.lengths = sorted(set(lengths))
        except TypeError:
            self.lengths = []
        if isinstance(lengths, str) or not self.lengths or any(type(one) is not int or one < 1 for one in self.lengths):
            raise ValueError(f"lengths: got {lengths!r:.50}, wants numbers of tokens, positive ints")
        self._network = network
        name, mask = self._mask("example_input", example)
        kept = are_tokens(name, mask)
        tells_padding = name.endswith(PADDING) != name.startswith("~")
        #: By the place of each tensor that has tokens, what is in their padding.
        self._fills: dict[str, bool | int | float] = {}
        for place, each in tensors_by_name(example).items():
            if each.shape[:2] == kept.shape:
                padding = each[~kept].unique()
                self._fills[place] = padding.item() if padding.numel() == 1 else int(tells_padding and each is mask)
        self._check(example, mask.shape[1])

    def _mask(self, name: str, x: Any) -> tuple[str, Tensor]:
        if not isinstance(x, (tuple, Mapping)):
            raise TypeError(f"{name}: got {kind_of(x)}, wants a tuple or dict of the backbone's arguments with a mask")
        if (found := self._network.mask_in(x)) is None:
            wants = f"one [N, T] by which heads read, or whose name ends in {TOKENS!r} or {PADDING!r}"
            raise ValueError(f"{name}: lengths are padded by a mask, wants {wants}")
        return found

    @torch.no_grad()
    def _check(self, example: Batch, tokens: int) -> None:
        """Raise ``ValueError`` if the logits of any exit change where the example is padded."""
        longest = self.lengths[-1]
        short = example if tokens < longest else self.to(longest - 1, example) if longest > 1 else example
        own, padded = self._network.logits(short), self._network.logits(self.to(longest, short))
        allowed = _ROUNDINGS * torch.finfo(own[-1].dtype).eps
        for name, one, other in zip([*self._network.taps, "the classifier"], own, padded, strict=True):
            if not (off := relative_error([other], [one.double()])) <= allowed:
                raise ValueError(
                    f"lengths: logits of {name} change by {off:.2g} of the largest where the example is padded to "
                    f"{longest} tokens; wants layers and heads that leave padding out, and an example that is padded "
                    "as requests are, with another number of tokens than of anything else in it"
                )

    def length_of(self, x: Batch) -> int:
        """Return the index of the length for a batch."""
        tokens = self._mask("x", x)[1].shape[1]
        if not 0 < tokens <= self.lengths[-1]:
            raise ValueError(f"x: has {tokens} tokens, wants 1 to {self.lengths[-1]}, the longest of lengths")
        return bisect_left(self.lengths, tokens)

    def to(self, length: int, x: Batch) -> Batch:
        """Return a batch with so many tokens: padded behind its own, or the first ones."""
        tokens = self._mask("x", x)[1].shape[1]
        fills = {id(each): self._fills[place] for place, each in tensors_by_name(x).items() if place in self._fills}

        def resized(each: Tensor) -> Tensor:
            if id(each) not in fills or each.ndim < 2 or each.shape[1] != tokens:  # which is refused
                return each
            more = each.new_full((len(each), max(0, length - tokens), *each.shape[2:]), fills[id(each)])
            return torch.cat([each[:, :length], more], 1)

        return map_tensors(x, resized)


def _taking_rows(network: EarlyExitNetwork, packing: Packing) -> EarlyExitNetwork:
    """Return the network with a backbone that takes rows, and reading that finds masks in them; all else is shared."""
    taking = copy.copy(network)
    taking._modules = {**network._modules, "backbone": taking_rows(network.backbone, packing)}
    taking.forget_repeats()
    taking.reading = network.reading_for_rows(packing)
    return taking
