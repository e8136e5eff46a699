"""``make_runner``: the front door, which turns a network into a runner."""

import os
from collections.abc import Sequence

from torch import Tensor

from .auto.auto_runner import AutoRunner
from .early_exit_network import EarlyExitNetwork
from .runners.checks import check_mode, check_sizes
from .runners.compacting import CompactingRunner
from .runners.eager import EagerRunner
from .runners.gated import GatedRunner
from .runners.overlapped import OverlappedRunner
from .runners.polled import PolledRunner
from .runners.runner import Runner
from .trunk.trunk import check_kind, make_trunk

#: Ways to leave a network early; see the runners for what each does.
EXITS = ("eager", "overlapped", "polled", "gated", "auto")


def make_runner(
    network: EarlyExitNetwork,
    example_input: Tensor,
    *,
    exits: str = "overlapped",
    batch_sizes: Sequence[int] = (1,),
    trunk: str = "as_is",
    compact: bool = False,
    forks: Sequence[str] | None = None,
    plan: str | os.PathLike[str] | None = None,
) -> Runner:
    """Make a runner for a network.

    Args:
        network: in eval mode.
        example_input: a batch [N, ...] of any size, on the network's device; for "auto" samples like those to come.
        exits: "eager" (no graph, any device), "overlapped" (one graph, every head computed), "polled" (a graph a
            segment, the host stops launching), "gated" (one graph with conditional nodes, no host) or "auto" (for each
            batch size the one of these that is fastest on the example, measured now or read from ``plan``).
        batch_sizes: to capture.
        trunk: how the backbone is run, see :func:`make_trunk`.
        compact: for "polled", gather the samples that stay open into the captured batch sizes below, where that pays;
            see :class:`CompactingRunner`.
        forks: for "overlapped", the taps after which a launch of heads leaves the trunk, ``()`` for no overlap; None is
            by rule. See :class:`OverlappedRunner`.
        plan: for "auto", path of a JSON file that keeps what was measured, and is used where its conditions are still
            the same; see :class:`AutoRunner`. None measures, and keeps nothing.

    Raises:
        ValueError, TypeError: an argument that does not fit.
        RuntimeError: the backbone cannot be captured in a CUDA graph, and the message names the layer; or autocast is
            on, or the current stream is being captured, where only "eager" can be made.
    """
    if exits not in EXITS:
        raise ValueError(f"exits: got {exits!r}, wants one of {list(EXITS)}")
    if not isinstance(network, EarlyExitNetwork):
        raise TypeError(f"network: got {type(network).__name__}, wants an EarlyExitNetwork")
    if compact and exits != "polled":
        raise ValueError(f"compact: got {compact!r} with exits={exits!r}, wants False: only 'polled' gathers samples")
    if forks is not None and exits != "overlapped":
        raise ValueError(f"forks: got {forks!r} with exits={exits!r}, wants None: only 'overlapped' has forks")
    if plan is not None and exits != "auto":
        raise ValueError(f"plan: got {plan!r} with exits={exits!r}, wants None: only 'auto' has a plan")
    if exits == "eager":
        check_sizes(batch_sizes)
        check_kind("trunk", trunk)
        check_mode(network)
        network.check_taps(example_input)
        return EagerRunner(network, trunk=make_trunk(network.backbone, network.taps, example_input, trunk))
    if exits == "auto":
        return AutoRunner(network, example_input, batch_sizes=batch_sizes, trunk=trunk, plan=plan)
    if exits == "overlapped":
        return OverlappedRunner(network, example_input, batch_sizes=batch_sizes, trunk=trunk, forks=forks)
    if exits == "polled":
        polled = CompactingRunner if compact else PolledRunner
        return polled(network, example_input, batch_sizes=batch_sizes, trunk=trunk)
    return GatedRunner(network, example_input, batch_sizes=batch_sizes, trunk=trunk)
