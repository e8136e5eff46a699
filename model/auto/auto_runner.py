"""``AutoRunner``: ``exits="auto"``, which answers with the fastest runner for each batch size."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import Tensor

from ...kernels.cuda.lifetimes import refuse_forked
from ...kernels.cuda.runtime import beside_captures
from ..answers.exit_monitor import uncounted
from ..answers.exit_result import ExitResult, joined
from ..basics.streams import OwnedLock
from ..network.early_exit_network import EarlyExitNetwork
from ..runners.checks import check_capturable, check_no_outer_capture, check_request, sizes_of
from ..runners.runner import Runner
from ..trunk.timed_convolutions import keeping_answers
from ..trunk.trunk import check_kind
from .candidates import ANY_TRUNK, MeasuredRunner, SharedTrunks
from .pass_times import STANDARD, Deadline, batches_of, check_budget, done_of, exits_of
from .plan import REMEMBERED, Plan, PlanFile, conditions_of, remembered
from .planner import Planner

#: Batch sizes: that of the example, and each other one once it is asked for.
ON_DEMAND = "on_demand"
#: Batch sizes that are captured on demand, each of which has memory of its own.
_MOST_SIZES = 8


class AutoRunner(Runner):
    """Runs each batch size by the runner, on the trunk, that answered fastest when it was measured.

    Which one that is depends on the GPU, the network, the batch and on how many samples leave where: the example input
    should be like the requests to come, and the rules those that will be in force. Without overlap, with few forks or
    many, polled, gated: of those that are equally fast the simplest is taken, and none that is slower, beyond noise,
    than the plain graph: that of ``exits="overlapped"``, on the backbone as it is if the trunk is chosen, too.
    """

    def __init__(
        self,
        network: EarlyExitNetwork,
        example_input: Tensor,
        *,
        batch_sizes: Sequence[int] | str | None = None,
        trunk: str = ANY_TRUNK,
        budget: str = STANDARD,
        plan: str | os.PathLike[str] | None = None,
    ) -> None:
        """Make the runners that a plan names, or make, check and measure every candidate and close what is not chosen.

        See :func:`make_runner` for the arguments. With "on_demand" up to eight sizes are captured. A request that adds
        one takes as long as the budget allows; where it cannot be added, and beyond those eight, requests are padded
        or split, and ``describe`` says why. What does not fit into the budget is left out, and ``describe`` says so;
        the plain graph is measured on every trunk that was made, unless it has to be compiled anew for a size. What
        stops early is left out where the example does not. The first time on a machine compiling the kernels takes most
        of the budget.

        A plan file, with "auto" one in the user's cache folder, is used if device, versions, network, rules, trunk,
        batch sizes, samples and, in steps of 5 %, the shares of samples that leave at each exit are those that it was
        measured with, and the budget was no smaller; else all is measured, and the file written. A damaged file is
        replaced, and one that cannot be written left out, each with a warning.

        Raises:
            ValueError, TypeError, RuntimeError: as :class:`GraphRunner` does, and for a path that no file can have; a
                candidate other than the plain graph that cannot be made, or answers otherwise, is left out, and its
                plan says so.
        """
        on_demand = isinstance(batch_sizes, str) and batch_sizes == ON_DEMAND
        sizes = sizes_of(None if on_demand else batch_sizes, example_input)
        check_kind("trunk", trunk, more=(ANY_TRUNK,))
        check_budget(budget)
        check_capturable(network, example_input)
        self.network = network
        self._asked: dict[str, Any] = {
            "trunk": trunk,
            "budget": budget,
            "batch sizes": ON_DEMAND if on_demand else sizes,
        }
        self._path = plan
        self._file: PlanFile | None = None
        self._runners: dict[int, MeasuredRunner] = {}
        self._plans: dict[int, Plan] = {}
        self._not_added: dict[int, str] = {}
        self._example: Tensor | None = None  # to add batch sizes by
        self._busy = OwnedLock()  # while one is added
        try:
            with beside_captures(), uncounted(network.monitor):
                self._make(example_input, sizes)
                if on_demand:
                    self._example = example_input.detach().clone()  # whose owner may change it
        except BaseException:
            self.close()
            raise

    def _make(self, example_input: Tensor, sizes: Sequence[int]) -> None:
        """Make runners of batch sizes that are new."""
        network, asked = self.network, self._asked
        deadline = Deadline.of(asked["budget"])
        first_sizes = [len(example_input)] if asked["batch sizes"] == ON_DEMAND else sizes
        batches = {size: batches_of(example_input, size) for size in {*sizes, *first_sizes}}
        exits = {size: exits_of(network, of_size) for size, of_size in batches.items()}
        stored: dict[int, Plan] = {}
        if self._path is not None:
            of_first = {size: exits[size] for size in first_sizes}
            conditions = conditions_of(network, example_input, asked, of_first)
            self._file = remembered(conditions) if self._path == REMEMBERED else PlanFile(self._path, conditions)
            stored = {} if self._file is None else self._file.read()
        known = {key: answer for plan in stored.values() for key, answer in plan.sooner.items()}
        hurried = [size for size in sizes if size in stored and stored[size].hurried]
        for size in hurried:
            del stored[size]
        # Those of other batch sizes hold the weights as of the last refresh.
        made = {self._plans[size].chosen.trunk: runner.trunk for size, runner in self._runners.items()}
        trunks = SharedTrunks(network, batches[max(sizes)][0], asked["trunk"], made)
        plans: dict[int, Plan] = {}
        with closing(trunks), _shown_on_terminal() as say, keeping_answers(known) as sooner:
            if asked["budget"] != "quick" and not stored.keys() >= {*sizes}:
                trunks.expect_compiling()
            for index, size in enumerate(sizes):
                smaller = sizes[:index]
                if size in stored:
                    with suppress(RuntimeError, ValueError):  # there may be less memory than then
                        chosen = stored[size].chosen
                        say(f"batch {size}: {chosen.name}, as before")
                        trunk = trunks.get(chosen.trunk)
                        done = done_of(exits[size], len(network.taps))
                        runner = chosen.make(network, example_input, size, smaller, trunk, done)
                        self._plans[size] = plans[size] = stored[size]
                        self._runners[size] = runner
                        continue
                planner = Planner(network, example_input, size, trunks, deadline, say)
                plan, runner = planner.plan(batches[size], exits[size], smaller, len(sizes) - index)
                self._plans[size] = plans[size] = replace(plan, hurried=plan.hurried and size not in hurried)
                self._runners[size] = runner
        plans = {size: replace(plan, sooner={**plan.sooner, **sooner}) for size, plan in plans.items()}
        self._plans.update(plans)
        is_new = not all(plan.from_file for plan in plans.values()) or not known.keys() >= sooner.keys()
        if self._file is not None and is_new:
            self._file.write({**stored, **plans})

    @property
    def plans(self) -> Mapping[int, Plan]:
        """By batch size, what was measured and chosen, each described at length."""
        return MappingProxyType(self._plans)

    @property
    def runners(self) -> Mapping[int, MeasuredRunner]:
        """By batch size, the runner that was chosen, which says what it captured."""
        return MappingProxyType(self._runners)

    def __call__(self, x: Tensor) -> ExitResult:
        """Answer for a batch; see :meth:`GraphRunner.__call__`."""
        refuse_forked()
        if self._example is not None and _samples(x) not in self._runners:
            self._add(x, self._example)
        self._refuse_closed()
        largest = max(self._runners)
        parts = x.split(largest) if _samples(x) > largest else (x,)
        sizes = [min(size for size in self._runners if size >= _samples(part)) for part in parts]
        runners = [self._runners[size] for size in sizes]  # a handler of signals may close this one meanwhile
        results = [runner(part) for runner, part in zip(runners, parts, strict=True)]
        return results[0] if len(results) == 1 else joined(results)

    def _add(self, x: Tensor, example_input: Tensor) -> None:
        """Make a runner of the size of a request, unless there are enough or it could not be made before."""
        size = check_request(x, example_input.shape[1:], example_input.dtype, example_input.device)
        if size in self._not_added or len(self._runners) + len(self._not_added) >= _MOST_SIZES:
            return
        self._refuse_while_busy()
        with self._busy, torch.cuda.device_of(example_input):
            check_no_outer_capture()
            try:
                with (
                    beside_captures(),
                    uncounted(self.network.monitor),
                    torch.autocast(example_input.device.type, enabled=False),
                ):
                    check_capturable(self.network, example_input)
                    self._make(example_input, [size])
            except (RuntimeError, ValueError) as error:
                self._not_added[size] = " ".join(str(error).split())

    def _refuse_while_busy(self) -> None:
        if self._busy.is_taken():
            raise RuntimeError("this runner is in another call, which adds a batch size; give each thread its own")

    def _refuse_closed(self) -> None:
        if not self._runners:
            raise RuntimeError("this runner is closed")

    def describe(self) -> str:
        """Say in three lines for each batch size what was chosen, what that gains, and what else there was.

        ``plans`` has it at length, and ``runners`` what was captured.
        """
        self._refuse_closed()
        lines = []
        for size in sorted(self._runners):
            plan = self._plans[size]
            lines += [
                f"Batch {size}: {plan.chosen.runner}, trunk {plan.chosen.trunk}.",
                f"  {plan.reason()}.",
                f"  {' '.join([*plan.others(), self._origin(plan)])}",
            ]
        return "\n".join([*lines, *(f"Batch {size} was not added: {why}" for size, why in self._not_added.items())])

    def _origin(self, plan: Plan) -> str:
        """Say where a plan comes from."""
        if self._file is None:
            return "Measured now."
        if plan.from_file:
            return f"From {self._file.path}, measured on {plan.utc[:10]}."
        again = ", in a hurry: the next process looks once more" if plan.hurried else ""
        if self._file.differing:
            return f"Measured now{again}; not as in {self._file.path}: {', '.join(self._file.differing)}."
        return f"Measured now{again}; {self._file.path} held no plan that fits."

    def refresh(self) -> None:
        """Take over parameters that were changed in place; see :meth:`GraphRunner.refresh`."""
        self._refuse_while_busy()
        self._refuse_closed()
        for runner in self._runners.values():
            runner.refresh()

    def close(self) -> None:
        """Close the runners, or none of them; see :meth:`GraphRunner.close`."""
        self.check_closable()
        with self._busy:  # once another thread has added its batch size
            runners = [*self._runners.values()]
            self._runners.clear()
            self._example = None
            for runner in runners:
                runner.close()

    def check_closable(self) -> None:
        """Raise what :meth:`close` would raise now."""
        if self._busy.is_mine():
            raise RuntimeError("this runner is in a call of this thread, which close() would wait for")
        for runner in [*self._runners.values()]:
            runner.check_closable()


@contextmanager
def _shown_on_terminal() -> Iterator[Callable[[str], None]]:
    """Show what is under way, if standard error is a terminal; without a thread, which measuring would feel."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: None
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda what: live.update(Text(f"make_runner: {what}"), refresh=True)


def _samples(x: object) -> int:
    return len(x) if isinstance(x, Tensor) and x.ndim else 0
