"""``EagerRunner``: no graph, any device and batch size."""

import torch
from torch import Tensor

from ..arguments import check_batch
from ..eager_pass import run_eagerly
from ..early_exit_network import EarlyExitNetwork
from ..exit_result import ExitResult
from ..exits_plans import ExitsPlans
from ..rule_order import note_pass, wait_for_write
from ..trunk.trunk import Trunk
from .leaving import REQUEST
from .runner import Runner


class EagerRunner(Runner):
    """Runs an :class:`EarlyExitNetwork` without a graph; see :func:`run_eagerly`."""

    def __init__(self, network: EarlyExitNetwork, *, trunk: Trunk | None = None) -> None:
        """Run a network, with ``trunk`` instead of its backbone if there is one; see :func:`run_eagerly`."""
        self.network = network
        self._plans = ExitsPlans()
        self._trunk = trunk

    def __call__(self, x: Tensor, *, stop: bool = False) -> ExitResult:
        """Answer for a batch of at least one sample that the backbone takes; ``stop`` as in :func:`run_eagerly`."""
        network, trunk = self.network, self._trunk
        check_batch("x", x)
        network.check_taps(x)
        backbone, classifier, reading, read = network.backbone, None, network.reading, None
        if trunk is not None:
            backbone, classifier, reading = trunk.module, trunk.classifier, trunk.reading
            read = wait_for_write(backbone, x)
            x = x.contiguous(memory_format=trunk.memory_format)
        with REQUEST:
            answer = run_eagerly(
                backbone,
                network.taps,
                network.exit_heads,
                x,
                classifier=classifier,
                stop=stop,
                plans=self._plans,
                monitor=network.monitor,
                reading=reading,
            )
        if read is not None:
            read.record(torch.cuda.current_stream(x.device))
        if backbone is not network.backbone:
            note_pass(x)  # which has read the trunk's own weights, and those go with this runner
        return answer

    def describe(self) -> str:
        """Say what was made of the trunk, a line each."""
        return "\n".join(() if self._trunk is None else self._trunk.notes)

    def refresh(self) -> None:
        """Take over parameters of the backbone that were changed in place, where the trunk holds copies of them."""
        if self._trunk is not None:
            self._trunk.refresh()

    def close(self) -> None:
        """Do nothing: an eager runner holds nothing."""
