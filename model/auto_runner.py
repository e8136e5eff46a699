"""``exits="auto"``: each runner measured on the user's own samples, and for each batch size the fastest one kept."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .exit_result import ExitResult, joined
from .gated_runner import GatedRunner
from .graph_runner import GraphRunner, check_sizes
from .overlapped_runner import OverlappedRunner
from .polled_runner import PolledRunner

if TYPE_CHECKING:
    from typing_extensions import Self

    from .early_exit_network import EarlyExitNetwork

#: What the others have to beat: the whole network, heads included, in one graph.
PLAIN = "overlapped"
_ROUNDS = 30
_WARM_UP = 5
#: Different batches of the example that a measurement goes through.
_BATCHES = 16


class HostTime(NamedTuple):
    """Host time from the call until the answer is there, in microseconds: median, 20th and 80th percentile."""

    median: float
    p20: float
    p80: float


class AutoRunner:
    """Runs each batch size by the runner that answered fastest when this one was made.

    Which one that is depends on the GPU, the network, the batch and on how many samples leave where: the example input
    should be like the requests to come, and the rules those that will be in force. A runner that skips work is taken
    only if it is faster than the plain graph beyond the spread of both.
    """

    def __init__(
        self,
        network: "EarlyExitNetwork",
        example_input: Tensor,
        *,
        batch_sizes: Sequence[int] = (1,),
        trunk: str = "as_is",
    ) -> None:
        """Capture, check and measure every runner of ``network``, and close those that were not chosen.

        Args:
            network: see :class:`GraphRunner`.
            example_input: samples like those to come, the more the better; see :class:`GraphRunner`.
            batch_sizes: see :class:`GraphRunner`.
            trunk: see :class:`GraphRunner`.

        Raises:
            ValueError, TypeError, RuntimeError: as :class:`GraphRunner` does; a runner other than the plain graph that
                cannot be made, or answers otherwise, is left out, and ``describe`` says so.
        """
        self.network = network
        self._runners: dict[int, GraphRunner] = {}
        self._reasons: list[str] = []
        try:
            for size in check_sizes(batch_sizes):
                self._runners[size], reason = _fastest(network, example_input, size, trunk)
                self._reasons.append(f"Batch {size}: {reason}")
        except BaseException:
            self.close()
            raise

    def __call__(self, x: Tensor) -> ExitResult:
        """Answer for a batch; see :meth:`GraphRunner.__call__`."""
        if not self._runners:
            raise RuntimeError("this runner is closed")
        largest = max(self._runners)
        parts = x.split(largest) if isinstance(x, Tensor) and x.ndim and len(x) > largest else (x,)
        results = [self._runner_for(part)(part) for part in parts]
        return results[0] if len(results) == 1 else joined(results)

    def _runner_for(self, x: Tensor) -> GraphRunner:
        samples = len(x) if isinstance(x, Tensor) and x.ndim else 0
        return self._runners[min(size for size in self._runners if size >= samples)]

    def describe(self) -> str:
        """Say for each batch size what was chosen and why, and what it captured."""
        captured = [runner.describe() for runner in self._runners.values()]
        return "\n".join(line for pair in zip(self._reasons, captured, strict=True) for line in pair)

    def refresh(self) -> None:
        """Take over parameters that were changed in place; see :meth:`GraphRunner.refresh`."""
        for runner in self._runners.values():
            runner.refresh()

    def close(self) -> None:
        """Close the runners; see :meth:`GraphRunner.close`."""
        while self._runners:
            self._runners.popitem()[1].close()

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.close()


def _fastest(network: "EarlyExitNetwork", example_input: Tensor, size: int, trunk: str) -> tuple[GraphRunner, str]:
    """Make all runners for one batch size and keep one; returns it and why."""
    plain = OverlappedRunner(network, example_input, batch_sizes=(size,), trunk=trunk)
    others: dict[str, Callable[[], GraphRunner]] = {
        "polled": lambda: PolledRunner(network, example_input, batch_sizes=(size,), trunk=trunk),
        "gated": lambda: GatedRunner(network, example_input, batch_sizes=(size,), trunk=trunk),
        "gated, lag 1": lambda: GatedRunner(network, example_input, batch_sizes=(size,), trunk=trunk, lag=1),
    }
    runners: dict[str, GraphRunner] = {PLAIN: plain}
    left_out: list[str] = []
    chosen = None
    try:
        batches = _batches(example_input, size)
        for name, make in others.items():
            try:
                runners[name] = make()
            except RuntimeError as error:
                left_out.append(f"{name} left out: {error}")
                continue
            if not _alike(runners[name], plain, batches):
                runners.pop(name).close()
                left_out.append(f"{name} left out: it answered otherwise than {PLAIN}")
        times = measure(runners, batches)
        chosen = choose(times)
    finally:
        for name, runner in runners.items():
            if name != chosen:
                runner.close()
    slower = ", ".join(f"{name} {times[name].median:,.0f}" for name in runners if name != chosen)
    reason = f"{chosen}, {times[chosen].median:,.0f} us to the answer" + (f" ({slower})." if slower else ".")
    return runners[chosen], " ".join([reason, *(f"{line}." for line in left_out)])


def _batches(example_input: Tensor, size: int) -> list[Tensor]:
    """Cut the example into batches of one size, filling a short one with its first samples again."""
    repeats = -(-size // len(example_input))
    samples = torch.cat([example_input] * repeats) if repeats > 1 else example_input
    return list(samples[: len(samples) // size * size].split(size))[:_BATCHES]


def _alike(runner: GraphRunner, plain: GraphRunner, batches: Sequence[Tensor]) -> bool:
    """Whether two runners of one trunk give the same labels and exits, rounding at a threshold apart: 1 in 100."""
    samples, differing = 0, 0
    for x in batches:
        found, wanted = runner(x), plain(x)
        differing += int(((found.label != wanted.label) | (found.exit_index != wanted.exit_index)).sum())
        samples += len(x)
    return differing <= samples // 100


def measure(runners: Mapping[str, GraphRunner], batches: Sequence[Tensor]) -> dict[str, HostTime]:
    """Time requests from an idle device until the answer is there, the runners taking turns."""
    us: dict[str, list[float]] = {name: [] for name in runners}
    device = batches[0].device
    for turn in range(-_WARM_UP, _ROUNDS):
        x = batches[turn % len(batches)]
        for name, runner in runners.items():
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            runner(x)
            torch.cuda.current_stream(device).synchronize()
            if turn >= 0:
                us[name].append((time.perf_counter() - began) * 1e6)
    return {name: _summary(values) for name, values in us.items()}


def _summary(values: Sequence[float]) -> HostTime:
    fifths = statistics.quantiles(values, n=5)
    return HostTime(statistics.median(values), fifths[0], fifths[-1])


def choose(times: Mapping[str, HostTime]) -> str:
    """Choose the fastest, or the plain graph unless the fastest is faster beyond the spread of both."""
    fastest = min(times, key=lambda name: times[name].median)
    return fastest if times[fastest].p80 < times[PLAIN].p20 else PLAIN
