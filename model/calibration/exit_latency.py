"""Latency of a runner by exit: measured, and what it comes to when samples arrive in batches."""

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.reference.criteria import CRITERIA
from ..answers.exit_result import ExitResult
from ..answers.exit_rule import ExitRule
from ..basics.machine import processor_name
from ..basics.tables import text_table, wrapped
from ..listening.batches import Batch, check_input_batch, first_tensor
from ..network.early_exit_network import EarlyExitNetwork, check_network


@dataclass(frozen=True)
class ExitLatencies:
    """Time to the answer of a runner when all samples of a batch leave at one exit.

    Raises:
        ValueError, TypeError: times that are no numbers from 0, or a batch size that is no whole number from 1.
    """

    milliseconds: tuple[float, ...]
    """For each of the E heads and, last, the classifier: from the call on an idle device until the host has the
    answer."""
    batch_size: int
    """Samples of a batch."""
    runner: str
    """Name of its class, for people."""
    device: str
    """Name of the GPU or the processor, for people."""

    def __repr__(self) -> str:
        """Show them as a table."""
        names = [f"{index}" for index in range(len(self.milliseconds) - 1)]
        times = [f"{one:.3g}" for one in self.milliseconds]
        rows = zip([*names, f"{len(names)}: classifier"], times, strict=True)
        said = f"Batches of {self.batch_size:,} that leave whole at an exit ({self.runner}, {self.device}):"
        return f"{wrapped([said])}\n{text_table([['exit', 'answer in, ms'], *map(list, rows)])}"

    def __post_init__(self) -> None:
        """Check the numbers, which the choice of thresholds goes by."""
        times = self.milliseconds
        if not isinstance(times, Sequence) or not all(type(one) in (int, float) for one in times):
            raise TypeError(f"milliseconds: got {times!r:.100}, wants a number for each exit")
        if not all(0.0 <= one < math.inf for one in times):
            raise ValueError(f"milliseconds: got {list(times)!r:.100}, wants numbers from 0")
        if type(self.batch_size) is not int or self.batch_size < 1:
            raise ValueError(f"batch_size: got {self.batch_size!r}, wants a whole number from 1")


def measure_exit_latencies(
    network: EarlyExitNetwork, runner: Callable[..., ExitResult], x: Batch, *, rounds: int = 30
) -> ExitLatencies:
    """Measure the time to the answer for each exit; medians of rounds in which the exits take turns.

    The network's rules are changed meanwhile, and are as before when this returns or raises.

    Args:
        network: whose rules the runner follows.
        runner: a runner of that network, or what else turns a batch into its answers, such as
            ``functools.partial(network, stop=True)``; one whose batches leave when all their samples have.
        x: a batch of the size that requests have.
        rounds: timed calls for each exit, after three that are not.

    Raises:
        TypeError, ValueError: arguments that are none of these, or a runner that does not follow the network's rules.
    """
    check_network(network)
    check_input_batch("x", x)
    first = first_tensor(x)
    if type(rounds) is not int or rounds < 1:
        raise ValueError(f"rounds: got {rounds!r}, wants a whole number of at least 1")
    heads = network.exit_heads
    before = [copy.deepcopy(head.rule) for head in heads]
    times: list[list[float]] = [[] for _ in range(len(heads) + 1)]
    try:
        for number in range(-3, rounds):
            for exit_index, own in enumerate(times):
                for index, (head, rule) in enumerate(zip(heads, before, strict=True)):
                    lowest = CRITERIA[rule.criterion][0]
                    head.rule.assign(ExitRule(lowest, criterion=rule.criterion, enabled=index == exit_index))
                if first.is_cuda:
                    torch.cuda.synchronize(first.device)
                began = time.perf_counter()
                answer = runner(x)
                answer.label.cpu()
                if number >= 0:
                    own.append((time.perf_counter() - began) * 1e3)
                elif not bool((answer.exit_index == exit_index).all()):
                    raise ValueError(
                        f"runner: answered at exits {sorted(set(answer.exit_index.tolist()))} where exit {exit_index} "
                        "alone is open, wants a runner of this network"
                    )
    finally:
        for head, rule in zip(heads, before, strict=True):
            head.rule.assign(rule)
    device = torch.cuda.get_device_name(first.device) if first.is_cuda else processor_name() or "CPU"
    return ExitLatencies(tuple(map(statistics.median, times)), len(first), type(runner).__name__, device)


def check_latencies(latencies: object, heads: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless latencies are those of a network with so many heads."""
    if not isinstance(latencies, ExitLatencies):
        raise TypeError(f"latencies: got {type(latencies).__name__}, wants those of measure_exit_latencies")
    if len(latencies.milliseconds) != heads + 1:
        raise ValueError(
            f"latencies: are of {len(latencies.milliseconds)} exits, wants {heads + 1}, as the network has"
        )


def expected_latency(exits: Tensor, latencies: ExitLatencies) -> float:
    """Return the mean time to the answer, milliseconds, of batches that leave when their last sample does.

    A batch is ``latencies.batch_size`` samples in a row, from any sample on; after the last one come the first
    again. The order of samples is the pattern of arrival.

    Args:
        exits: [M] int64, exit index of each sample in the order in which they arrive.
        latencies: of batches of at most M samples; ``ValueError`` for larger ones.
    """
    size = latencies.batch_size
    if size > len(exits):
        raise ValueError(f"latencies: are of batches of {size}, wants 1 to {len(exits)}, as many as there are samples")
    last = torch.cat([exits, exits[: size - 1]]).unfold(0, size, 1).amax(1)
    return torch.tensor(latencies.milliseconds, dtype=torch.float64, device="cpu")[last].mean().item()
