"""``ExitMonitor``: counts on the device where samples leave and how sure exits are, and tells when that has drifted."""

import math
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.cuda.runtime import is_capturing
from ...kernels.reference.criteria import TALLY_BINS
from ..basics.arguments import kind_of
from ..basics.streams import has_streams


class DriftWarning(UserWarning):
    """Samples leave at other exits than those that thresholds were calibrated with."""


class ExitDrift(NamedTuple):
    """An exit whose share of the samples is outside of its range."""

    exit_index: int
    """Of the exit, the classifier's the last."""
    share: float
    """Of the samples counted, 0 to 1."""
    low: float
    """Where the range begins in which the share stays if nothing has changed."""
    high: float
    """Where it ends."""


class ExitMonitor:
    """Counts of a network's answers: by exit, and of each exit by confidence.

    ``network.monitor = ExitMonitor(...)`` before runners are made: the launches that merge answers then count them on
    the device, and nobody waits. All runners of the network count together, and so do eager calls; what is counted
    while a runner is made, which measures, is taken back. A copy of the network has a monitor of its own.
    """

    def __init__(self, shares: Sequence[float], samples: int, *, confidence: float = 0.999) -> None:
        """Expect the shares of a calibration.

        Args:
            shares: of the samples that left at each exit, the classifier last; they add up to 1.
            samples: by how many of them the shares were found.
            confidence: with which one call of ``check`` names no exit as long as nothing has changed. Of many calls
                each has its chance of a false alarm: at 0.999 at most one in a thousand.

        Raises:
            ValueError, TypeError: an argument that does not fit.
        """
        if not isinstance(confidence, float) or not 0.0 < confidence < 1.0:
            raise ValueError(f"confidence: got {confidence!r}, wants a number between 0 and 1")
        self.shares, self.samples = _checked(shares, samples)
        self.confidence = confidence
        self._tallies: dict[torch.device, Tensor] = {}
        self._changing = threading.RLock()  # on the CPU an addition is a read and a write

    def expect(self, shares: Sequence[float], samples: int) -> None:
        """Expect other shares, as where thresholds were chosen anew, and count from 0 again; runners go on counting.

        Args:
            shares: as many as before.
            samples: by how many of them the shares were found.

        Raises:
            ValueError, TypeError: an argument that does not fit; nothing is changed.
        """
        found, number = _checked(shares, samples)
        if len(found) != len(self.shares):
            raise ValueError(f"shares: got {len(found)}, wants {len(self.shares)}, as many exits as before")
        self.shares, self.samples = found, number
        self.reset()

    def tallies_on(self, device: torch.device) -> Tensor:
        """Return the counts [exits, 32] int64 on a device, which launches add to; runners call this."""
        if device not in self._tallies:
            with torch.inference_mode(False):  # other modes write to it
                zeros = torch.zeros(len(self.shares), TALLY_BINS, dtype=torch.int64, device=device)
            if has_streams(zeros) and not is_capturing(device):  # other threads add to them on other streams
                torch.cuda.current_stream(device).synchronize()
            self._tallies.setdefault(device, zeros)  # or keep those of a thread that came first
        return self._tallies[device]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take back, when the block ends, what is counted meanwhile, whoever did, in the current stream's order."""
        with self._changing:
            before = {device: tallies.clone() for device, tallies in self._tallies.items()}
        try:
            yield
        finally:
            with self._changing:
                for device, tallies in self._tallies.items():
                    tallies.sub_(tallies - before[device] if device in before else tallies)

    def count(self, exit_index: Tensor, confidence: Tensor, *, merged: int = 0) -> None:
        """Add answers [N] on their device, but for those of the first ``merged`` exits, which launches have counted."""
        tallies = self.tallies_on(exit_index.device)
        share = confidence.detach().nan_to_num(nan=0.0, posinf=1.0, neginf=0.0)
        of_bin = (share * TALLY_BINS).clamp(0, TALLY_BINS - 1).long()
        with torch.no_grad(), nullcontext() if torch.compiler.is_compiling() else self._changing:
            tallies.view(-1).index_add_(0, exit_index * TALLY_BINS + of_bin, (exit_index >= merged).long())

    def histogram(self) -> Tensor:
        """Return the answers so far, [exits, 32] int64 on the CPU: by exit and, in bins from 0 to 1, by confidence.

        Energies and counts of patience, which are of any size, are in the bins at the ends. The host waits for what is
        under way.
        """
        total = torch.zeros(len(self.shares), TALLY_BINS, dtype=torch.int64, device="cpu")
        for tallies in list(self._tallies.values()):  # to which another thread may add a device
            total += tallies.cpu()
        return total

    def counts(self) -> Tensor:
        """Return the answers of each exit so far, [exits] int64 on the CPU."""
        return self.histogram().sum(dim=1)

    def reset(self) -> None:
        """Count from 0 again, in the order of the current stream."""
        with self._changing:
            for tallies in self._tallies.values():
                tallies.zero_()

    def check(self) -> list[ExitDrift]:
        """Return the exits whose share has left its range, with a ``DriftWarning`` that names them.

        The range is that of Hoeffding's inequality (1963) for both shares, that of the calibration and that of the
        samples counted, over all exits together: it assumes nothing but that samples come independently.
        """
        counts = self.counts()
        counted = int(counts.sum())
        if not counted:
            return []
        level = math.log(4 * len(self.shares) / (1.0 - self.confidence)) / 2
        width = math.sqrt(level / self.samples) + math.sqrt(level / counted)
        drifted = [
            ExitDrift(index, share, max(0.0, expected - width), min(1.0, expected + width))
            for index, (share, expected) in enumerate(zip((counts / counted).tolist(), self.shares, strict=True))
            if abs(share - expected) > width
        ]
        if drifted:
            named = ", ".join(
                f"exit {one.exit_index} answers {one.share:.1%}, not {one.low:.1%} to {one.high:.1%}" for one in drifted
            )
            warnings.warn(
                f"of {counted:,} samples {named}: inputs are not as they were at calibration, choose thresholds anew",
                DriftWarning,
                stacklevel=2,
            )
        return drifted

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle what is expected; a copy counts for itself."""
        return _monitor, (self.shares, self.samples, self.confidence)


def _checked(shares: Sequence[float], samples: int) -> tuple[tuple[float, ...], int]:
    if not isinstance(shares, Sequence) or not all(isinstance(share, (int, float)) for share in shares):
        raise TypeError(f"shares: got {kind_of(shares)}, wants a number for each exit, the classifier last")
    if len(shares) < 2 or min(shares) < 0.0 or not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
        raise ValueError(f"shares: got {list(shares)}, wants one of each exit, 0 or more, that add up to 1")
    if not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples: got {samples!r}, wants a positive int")
    return tuple(map(float, shares)), samples


def uncounted(monitor: ExitMonitor | None) -> AbstractContextManager[None]:
    """Pause a network's monitor, if it has one."""
    return nullcontext() if monitor is None else monitor.paused()


def _monitor(shares: Sequence[float], samples: int, confidence: float) -> ExitMonitor:
    return ExitMonitor(shares, samples, confidence=confidence)
