"""Others' work beside runners in the soak run: memory of changing sizes, poison, canaries, caches that are emptied."""

import math
import threading
from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

#: Held while a runner is made: PyTorch refuses to empty its cache while a thread allocates for a capture.
MAKING = threading.Lock()
_PATTERN = 0x5EAF00D
_MOST_CANARIES = 48
_MOST_ELEMENTS = 1 << 20  # of four bytes
#: Shares of all steps.
_EMPTIES, _CLEARS = 0.02, 0.002


class Beside:
    """Allocates and frees on some streams, as a program around a runner would, and watches over its memory."""

    def __init__(self, device: torch.device, streams: Sequence[torch.cuda.Stream], random: Random) -> None:
        """Work on ``streams``, those of the requests and others."""
        self._device, self._streams, self._random = device, streams, random
        self._canaries: list[tuple[Tensor, int]] = []
        # Of each stream: additions on several would race.
        self._changed = [torch.zeros((), dtype=torch.int64, device=device) for _ in streams]

    def step(self, *, clears_workspaces: bool) -> None:
        """Do one thing at random; the host does not wait, but where a cache is emptied."""
        draw, where = self._random.random(), self._random.randrange(len(self._streams))
        elements = int(math.exp(self._random.random() * math.log(_MOST_ELEMENTS)))
        if draw < _EMPTIES:
            if draw < _CLEARS and clears_workspaces:
                torch._C._cuda_clearCublasWorkspaces()
            if MAKING.acquire(blocking=False):
                try:
                    torch.cuda.empty_cache()
                finally:
                    MAKING.release()
        elif draw < 0.5:
            with torch.cuda.stream(self._streams[where]):
                torch.full((elements,), float("nan"), device=self._device)
        elif draw < 0.75 and len(self._canaries) < _MOST_CANARIES:
            self.add(elements, where)
        elif self._canaries:
            self.check(self._random.randrange(len(self._canaries)))

    def add(self, elements: int, where: int) -> Tensor:
        """Allocate a canary on a stream, by its index, and return it."""
        with torch.cuda.stream(self._streams[where]):
            canary = torch.full((elements,), _PATTERN, dtype=torch.int32, device=self._device)
        self._canaries.append((canary, where))
        return canary

    def check(self, index: int) -> None:
        """Count the changed elements of a canary, on its stream, and free it."""
        canary, where = self._canaries.pop(index)
        with torch.cuda.stream(self._streams[where]):
            self._changed[where].add_((canary != _PATTERN).sum())
            del canary

    def check_all(self) -> None:
        """Check all canaries and free them."""
        while self._canaries:
            self.check(0)

    def synchronize(self) -> None:
        """Let the host wait for the work on all streams."""
        for stream in self._streams:
            stream.synchronize()

    def changed(self) -> int:
        """Return how many elements of canaries were not as they had been left; the host waits."""
        self.synchronize()
        return sum(int(count) for count in self._changed)
