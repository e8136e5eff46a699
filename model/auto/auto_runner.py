"""``AutoRunner``: ``exits="auto"``, which answers with the fastest runner for each batch size."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from textwrap import indent
from types import MappingProxyType

from torch import Tensor

from ...kernels.cuda_runtime import beside_captures
from ..early_exit_network import EarlyExitNetwork
from ..exit_result import ExitResult, joined
from ..runners.checks import check_capturable, check_sizes
from ..runners.runner import Runner
from ..trunk.trunk import check_kind
from .example_batches import batches_of, exits_of, shares_of
from .plan import Plan
from .plan_file import PlanFile, conditions_of
from .planner import measure_plan


class AutoRunner(Runner):
    """Runs each batch size by the runner that answered fastest when it was measured.

    Which one that is depends on the GPU, the network, the batch and on how many samples leave where: the example input
    should be like the requests to come, and the rules those that will be in force. Without overlap, with few forks or
    many, polled, gated: of those that are equally fast the simplest is taken, and none that is slower, beyond noise,
    than the plain graph of ``exits="overlapped"``.
    """

    def __init__(
        self,
        network: EarlyExitNetwork,
        example_input: Tensor,
        *,
        batch_sizes: Sequence[int] = (1,),
        trunk: str = "as_is",
        plan: str | os.PathLike[str] | None = None,
    ) -> None:
        """Make the runners that a plan names, or make, check and measure every candidate and close what is not chosen.

        See :class:`GraphRunner` for the arguments that all runners have; of ``example_input``, samples like those to
        come, the more the better. ``plan`` is the path of a JSON file for the plans of all batch sizes. It is used if
        device, versions, network, rules, trunk, batch sizes, samples and, in steps of 5 %, the shares of samples that
        leave at each exit are those that it was measured with; else all is measured, and the file written. None
        measures, and keeps nothing. A damaged file is replaced, and one that cannot be written left out, each with a
        warning.

        Raises:
            ValueError, TypeError, RuntimeError: as :class:`GraphRunner` does, and for a path that no file can have; a
                candidate other than the plain graph that cannot be made, or answers otherwise, is left out, and
                ``describe`` says so.
        """
        sizes = check_sizes(batch_sizes)
        check_kind("trunk", trunk)
        check_capturable(network, example_input)
        self.network = network
        self._runners: dict[int, Runner] = {}
        self._plans: dict[int, Plan] = {}
        try:
            with beside_captures():
                self._make(example_input, sizes, trunk, plan)
        except BaseException:
            self.close()
            raise

    def _make(
        self, example_input: Tensor, sizes: Sequence[int], trunk: str, plan: str | os.PathLike[str] | None
    ) -> None:
        network = self.network
        batches = {size: batches_of(example_input, size) for size in sizes}
        exits = {size: exits_of(network, of_size) for size, of_size in batches.items()}
        self._file = None if plan is None else PlanFile(plan, conditions_of(network, example_input, trunk, exits))
        stored = {} if self._file is None else self._file.read()
        for index, size in enumerate(sizes):
            smaller = sizes[:index]
            if size in stored:
                with suppress(RuntimeError, ValueError):  # there may be less memory than then
                    self._runners[size] = stored[size].chosen.make(network, example_input, size, smaller, trunk)
                    self._plans[size] = stored[size]
                    continue
            shares = shares_of(exits[size], len(network.taps))
            self._plans[size], self._runners[size] = measure_plan(
                network, example_input, batches[size], smaller, trunk, shares
            )
        if self._file is not None and not all(made.from_file for made in self._plans.values()):
            self._file.write(self._plans)

    @property
    def plans(self) -> Mapping[int, Plan]:
        """By batch size, what was measured and chosen."""
        return MappingProxyType(self._plans)

    def __call__(self, x: Tensor) -> ExitResult:
        """Answer for a batch; see :meth:`GraphRunner.__call__`."""
        self._refuse_closed()
        largest = max(self._runners)
        parts = x.split(largest) if isinstance(x, Tensor) and x.ndim and len(x) > largest else (x,)
        runners = [self._runner_for(part) for part in parts]  # a handler of signals may close this one meanwhile
        results = [runner(part) for runner, part in zip(runners, parts, strict=True)]
        return results[0] if len(results) == 1 else joined(results)

    def _refuse_closed(self) -> None:
        if not self._runners:
            raise RuntimeError("this runner is closed")

    def _runner_for(self, x: Tensor) -> Runner:
        samples = len(x) if isinstance(x, Tensor) and x.ndim else 0
        return self._runners[min(size for size in self._runners if size >= samples)]

    def describe(self) -> str:
        """Say for each batch size what was chosen and why, and what it captured; last, what became of the plan file."""
        self._refuse_closed()
        lines = [
            f"Batch {size}: {self._plans[size].describe()}\n{indent(runner.describe(), '  ')}"
            for size, runner in self._runners.items()
        ]
        return "\n".join([*lines, *self._describe_file()])

    def _describe_file(self) -> list[str]:
        if self._file is None:
            return []
        from_file = [size for size, plan in self._plans.items() if plan.from_file]
        if len(from_file) == len(self._plans):
            return [f"The plan comes from {self._file.path}."]
        if from_file:
            return [f"The plan comes from {self._file.path} but for what could not be made again and was measured."]
        if self._file.differing:
            return [f"Measured, since these are not as in {self._file.path}: {', '.join(self._file.differing)}."]
        return [f"Measured, since {self._file.path} held no plan."]

    def refresh(self) -> None:
        """Take over parameters that were changed in place; see :meth:`GraphRunner.refresh`."""
        self._refuse_closed()
        for runner in self._runners.values():
            runner.refresh()

    def close(self) -> None:
        """Close the runners, or none of them; see :meth:`GraphRunner.close`."""
        runners = [*self._runners.values()]
        for runner in runners:
            runner.check_closable()
        self._runners.clear()
        for runner in runners:
            runner.close()
