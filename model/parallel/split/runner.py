"""``SplitRunner``: the base of the runners of a network split over several devices in one process."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ...early_exit_network import EarlyExitNetwork
from ...exit_result import ExitResult, joined
from ...runners.captured_heads import CapturedHeads
from ...runners.serial_runner import SerialRunner
from .part import Part


class SplitRunner(SerialRunner):
    """Answers for batches by parts of a network, each on its device; see :func:`parallelize`, which makes it.

    Thresholds, temperatures and whether an exit is enabled may change at any time; parameters may change in place,
    followed by ``refresh``. A batch is padded to the next of the batch sizes, one above the largest is split. One
    request at a time: a call while another thread's is under way raises.
    """

    def __init__(
        self, network: EarlyExitNetwork, parts: Sequence[Part], example_input: Tensor, sizes: Sequence[int], notes: str
    ) -> None:
        """Answer for batches like the example by parts of a network, which have segments for each size."""
        super().__init__(network, example_input, sizes)
        self._parts = parts
        self._notes = notes
        self._heads = CapturedHeads(network)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Of each part, in the order in which a batch goes through them."""
        return tuple(part.device for part in self._parts)

    def _answer_in_parts(self, x: Tensor, samples: int) -> ExitResult:
        """Answer for a batch, split where it is larger than the largest size."""
        if samples <= self._sizes[-1]:
            return self._answer_one(x, self._size_for(samples))
        results = [self._answer_one(part, self._size_for(len(part))) for part in x.split(self._sizes[-1])]
        return joined(results)

    @abstractmethod
    def _answer_one(self, x: Tensor, size: int) -> ExitResult:
        """Answer for at most ``size`` samples by what there is for that size."""

    def _is_closed(self) -> bool:
        return not self._parts

    def describe(self) -> str:
        """Say which part of the network is on which device, with measured times, and how it runs."""
        self._refuse_closed()
        return self._notes

    def _refresh(self) -> None:
        for part in self._parts:
            part.refresh(self.network)

    def _free(self) -> None:
        self._parts = ()
