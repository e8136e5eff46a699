"""``SharedTrunks``: the trunks of one network, each made once for the runners of all batch sizes."""

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from ..early_exit_network import EarlyExitNetwork
from ..trunk.trunk import TRUNKS, Trunk, make_trunk

#: Name of the choice among all kinds of trunks.
ANY_TRUNK = "auto"


class SharedTrunks:
    """Makes each kind of trunk at its first use."""

    def __init__(self, network: EarlyExitNetwork, example: Tensor, asked: str, made: Mapping[str, Trunk]) -> None:
        """Make trunks of a network for batches like the example, but for those that runners have already ``made``."""
        self.kinds = TRUNKS if asked == ANY_TRUNK else (asked,)
        """Kinds to choose from, simplest first."""
        self._network, self._example = network, example
        self._made = dict(made)
        self._refused: dict[str, str] = {}
        self._seconds: dict[str, float] = {}

    def is_known(self, kind: str) -> bool:
        """Return whether asking for a trunk takes no time."""
        return kind in self._made or kind in self._refused

    def get(self, kind: str) -> Trunk:
        """Return a trunk.

        Raises:
            RuntimeError: it cannot be made of this backbone; the message says why.
        """
        if not self.is_known(kind):
            began = time.monotonic()
            backbone = self._network.backbone
            with torch.cuda.device_of(self._example):
                trunk = make_trunk(backbone, self._network.taps, self._example, kind, self._network.reading)
            if kind != "as_is" and trunk.module is backbone:
                self._refused[kind] = " ".join(trunk.notes).removeprefix(f"Not {kind}: ")
            else:
                self._made[kind] = trunk
            self._seconds[kind] = time.monotonic() - began
        if kind in self._refused:
            raise RuntimeError(self._refused[kind])
        return self._made[kind]

    def seconds_for(self, kind: str, size: int) -> float:
        """Return the time to expect of compiling a trunk anew, for a batch of another size than the example's."""
        return self._seconds.get(kind, 0.0) if kind == "inductor" and size != len(self._example) else 0.0
