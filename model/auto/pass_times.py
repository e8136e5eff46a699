"""``measure``: times of runners that take turns to answer for batches of the example, until a deadline."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...kernels import decide_in_order
from ..answers.exit_result import first_sure
from ..answers.rule_order import wait_for_writes
from ..basics.arguments import kind_of
from ..basics.streams import has_streams
from ..network.early_exit_network import EarlyExitNetwork

#: Different batches of the example that a measurement goes through.
_MOST_BATCHES = 16


def batches_of(example_input: Tensor, size: int) -> list[Tensor]:
    """Cut the example into batches of one size, filling a short one with its first samples again."""
    repeats = -(-size // len(example_input))
    samples = torch.cat([example_input] * repeats) if repeats > 1 else example_input
    return list(samples[: len(samples) // size * size].split(size))[:_MOST_BATCHES]


def exits_of(network: EarlyExitNetwork, batches: Sequence[Tensor]) -> Tensor:
    """Return [B, N] int64: the exit of each sample of each batch, by PyTorch's operations: none is compiled."""
    rules = [head.rule for head in network.exit_heads]
    exits = []
    with torch.inference_mode(False), torch.no_grad():
        for x in batches:
            if has_streams(x):
                wait_for_writes(rules, torch.cuda.current_stream(x.device))
            # of a copy: a backbone may change its input in place, and the batches are views of the user's example
            said = decide_in_order(
                network.logits(x.clone()),
                [(rule.temperature_tensor, rule.threshold_tensor, rule.criterion) for rule in rules],
            )
            exits.append(first_sure(said, with_probs=False).exit_index)
    return torch.stack(exits).cpu()


def shares_of(exits: Tensor, taps: int) -> tuple[float, ...]:
    """Return the shares of some exits that are at each tap and, last, at the classifier, 0 to 1."""
    return tuple((exits.flatten().bincount(minlength=taps + 1) / exits.numel()).tolist())


def done_of(exits: Tensor, taps: int) -> list[float]:
    """Return the shares of batches [B, N] all of whose samples leave by each tap, as one would bet on those to come.

    Half a batch more is counted as done and half a one as not (Jeffreys' prior): of a single batch little is known.
    """
    last = exits.amax(dim=1)
    return [(int((last <= tap).sum()) + 0.5) / (len(last) + 1.0) for tap in range(taps)]


#: Seconds that making a runner may take, by the name of the budget, and the usual one.
BUDGETS = {"quick": 10.0, "standard": 30.0, "thorough": 60.0}
STANDARD = "standard"
#: Seconds in which requests are made after the deadline, too: by the least passes few runners are told apart.
_LEAST_S = 1.0
#: Seconds in which the energy of a runner is measured, behind all passes: of that which was chosen and the plain graph.
ENERGY_S = 0.5


def check_budget(budget: object) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless an argument is one of ``BUDGETS``."""
    if not isinstance(budget, str):
        raise TypeError(f"budget: got {kind_of(budget)}, wants one of {', '.join(map(repr, BUDGETS))}")
    if budget not in BUDGETS:
        raise ValueError(f"budget: got {budget!r}, wants one of {', '.join(map(repr, BUDGETS))}")


@dataclass(frozen=True)
class Deadline:
    """A time by which all should be made and measured; what is under way then is not cut short."""

    budget: str
    seconds: float
    """From its beginning to its end."""
    end: float
    """By ``time.monotonic``."""

    @classmethod
    def of(cls, budget: str) -> "Deadline":
        """Begin a budget now, less what measuring takes after its end."""
        seconds = BUDGETS[budget] - _LEAST_S - 2 * ENERGY_S
        return cls(budget, seconds, time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds, less than none once it is over."""
        return self.end - time.monotonic()

    def part(self, parts: int) -> "Deadline":
        """Return the end of the first of so many equal parts of what is left."""
        part = self.left / parts
        return Deadline(self.budget, part, time.monotonic() + part)

    def too_late(self) -> str:
        """Say why something was not begun any more."""
        return f"too little was left of {self}"

    def __str__(self) -> str:
        return f"the {BUDGETS[self.budget]:g} s of budget={self.budget!r}"


#: Passes through the batches at least, of which chance lets one runner win all once in 256; and requests of each.
_LEAST_PASSES = 8
_LEAST_REQUESTS = 40
_WARM_UP_PASSES = 2


class Timed(Protocol):
    """What can be measured: a runner, or what is called as one."""

    def __call__(self, x: Tensor) -> object:
        """Answer for a batch on the current stream."""

    def wait_until_idle(self) -> None:
        """Let the host wait for what was launched on streams that no caller can wait for."""


class PassTimes(NamedTuple):
    """Mean time of a request in each pass through the batches of the example, in microseconds; one number a pass."""

    host: list[float]
    """From the call, on an idle device, until the answer is there."""
    device: list[float]
    """Among requests that follow back to back."""


def least_requests(batches: int) -> int:
    """Return the requests to one runner that measuring it on so many batches takes at least."""
    return (_LEAST_PASSES + _WARM_UP_PASSES) * (2 * batches + 1)


def measure(runners: Mapping[str, Timed], batches: Sequence[Tensor], deadline: Deadline) -> dict[str, PassTimes]:
    """Time passes through the batches, the runners taking turns in an order that rotates.

    A pass of a runner sends every batch from an idle device and waits for its answer, then all of them back to back.
    Where samples leave early some batches take long and others do not; their mean is what a request costs. After the
    deadline, and once this has taken a second, no more passes are begun than a choice needs.
    """
    with torch.cuda.device_of(batches[0]):  # events and streams are those of the current one
        return _measure(runners, batches, deadline)


def _measure(runners: Mapping[str, Timed], batches: Sequence[Tensor], deadline: Deadline) -> dict[str, PassTimes]:
    names = list(runners)
    device = batches[0].device
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = {name: PassTimes([], []) for name in names}
    until = max(deadline.end, time.monotonic() + _LEAST_S)
    for turn in range(-_WARM_UP_PASSES, max(_LEAST_PASSES, -(-_LEAST_REQUESTS // len(batches)))):
        if turn >= _LEAST_PASSES and time.monotonic() > until:
            break
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            runner = runners[name]
            runner(batches[-1])  # so that the L2 cache is as this runner leaves it
            waited = 0.0
            for x in batches:
                torch.cuda.current_stream(device).synchronize()
                for each in runners.values():  # and not for the device: another thread may be capturing
                    each.wait_until_idle()
                began = time.perf_counter()
                runner(x)
                torch.cuda.current_stream(device).synchronize()
                waited += time.perf_counter() - began
            start.record()
            for x in batches:
                runner(x)
            end.record()
            end.synchronize()
            if turn >= 0:
                times[name].host.append(waited * 1e6 / len(batches))
                times[name].device.append(start.elapsed_time(end) * 1e3 / len(batches))
    return times
