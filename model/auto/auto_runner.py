"""``exits="auto"``: for each batch size the runner that answers fastest, measured or remembered."""

from collections.abc import Mapping, Sequence
from textwrap import indent
from types import MappingProxyType

from torch import Tensor

from ..early_exit_network import EarlyExitNetwork
from ..exit_result import ExitResult, joined
from ..runners.graph_runner import GraphRunner, check_capturable, check_sizes
from ..runners.runner import Runner
from .plan import Plan
from .planner import make_planned


class AutoRunner(Runner):
    """Runs each batch size by the runner that answered fastest when it was measured.

    Which one that is depends on the GPU, the network, the batch and on how many samples leave where: the example input
    should be like the requests to come, and the rules those that will be in force. Without overlap, with few forks or
    many, polled, gated: of those that are equally fast the simplest is taken, and none that is slower, beyond noise,
    than the plain graph of ``exits="overlapped"``.

    What was chosen is kept on disk, see :mod:`auxhead.model.auto.plan_store`, and measured again only where something
    differs that it depends on: device, driver, versions, this package's code, network, trunk, batch sizes, rules, and
    where the samples of the example leave. The plan of a network whose source cannot be read, as in a notebook, is not
    kept.
    """

    def __init__(
        self,
        network: EarlyExitNetwork,
        example_input: Tensor,
        *,
        batch_sizes: Sequence[int] = (1,),
        trunk: str = "as_is",
        fresh: bool = False,
    ) -> None:
        """Capture what is remembered, or capture, check and measure every candidate and close what was not chosen.

        Args:
            network: see :class:`GraphRunner`.
            example_input: samples like those to come, the more the better; see :class:`GraphRunner`.
            batch_sizes: see :class:`GraphRunner`.
            trunk: see :func:`make_trunk`.
            fresh: measure anew whatever is remembered.

        Raises:
            ValueError, TypeError, RuntimeError: as :class:`GraphRunner` does; a candidate other than the plain graph
                that cannot be made, or answers otherwise, is left out, and ``describe`` says so.
        """
        sizes = check_sizes(batch_sizes)
        check_capturable(network, example_input)
        self.network = network
        self._runners: dict[int, GraphRunner] = {}
        self._plans: dict[int, Plan] = {}
        try:
            for place, size in enumerate(sizes):
                planned = make_planned(network, example_input, size, sizes[:place], trunk, fresh=fresh)
                self._plans[size], self._runners[size] = planned
        except BaseException:
            self.close()
            raise

    @property
    def plans(self) -> Mapping[int, Plan]:
        """By batch size, what was measured and chosen."""
        return MappingProxyType(self._plans)

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
        return "\n".join(
            f"Batch {size}: {self._plans[size].describe()}\n{indent(runner.describe(), '  ')}"
            for size, runner in self._runners.items()
        )

    def refresh(self) -> None:
        """Take over parameters that were changed in place; see :meth:`GraphRunner.refresh`."""
        for runner in self._runners.values():
            runner.refresh()

    def close(self) -> None:
        """Close the runners; see :meth:`GraphRunner.close`."""
        while self._runners:
            self._runners.popitem()[1].close()
