"""Launches of footprints' heads beside the trunk by themselves; run as a module, those that Nsight Compute is to count.

It counts in a process of its own, which makes the network again and launches as the process that timed it did.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...kernels import ExitLaunch
from ..heads.in_situ import HeadsInSitu, SideLaunches
from ..measuring.cells import NEVER, Cell
from ..measuring.subject import build_subject, is_factory, load_subject
from ..overlap.parts import TRUNK_KIND
from .footprints import Footprint, footprints


def launch_beside(network: HeadsInSitu, footprint: Footprint) -> list[ExitLaunch]:
    """Launch once, on the current stream, what leaves the trunk with a footprint; return these launches in order."""
    taps = network.subject.network.taps
    beside = taps[: taps.index(footprint.point.forks[-1]) + 1]
    return network.launch(dict(footprint.configs), footprint.point, beside)


def launch_counted(cell: Mapping[str, Any], device: str, forks: Sequence[str], names: Sequence[str]) -> None:
    """Make a network and launch its heads with some footprints, one after another, where a profiler counts.

    Everything was launched once before, so that nothing is compiled or loaded there. Nothing is timed.

    Args:
        cell: of the network, as records hold it.
        device: that it is made on; a user's factory chooses its own.
        forks: as they were measured: taps after which launches leave the trunk.
        names: of the footprints.
    """
    model = cell["model"]
    subject = load_subject(model) if is_factory(model) else build_subject(Cell.from_json(cell), torch.device(device))
    where = subject.example.device
    with torch.cuda.device(where), torch.no_grad(), subject.exits(NEVER):
        network = HeadsInSitu(subject, TRUNK_KIND)
        found = footprints([head.shape for head in network.heads], SideLaunches(tuple(forks)))
        by_name = {footprint.name: footprint for footprint in found}
        for name in names:
            launch_beside(network, by_name[name])
        torch.cuda.synchronize(where)
        with torch.cuda.profiler.profile():
            for name in names:
                launch_beside(network, by_name[name])
            torch.cuda.synchronize(where)


if __name__ == "__main__":
    launch_counted(**json.loads(sys.argv[1]))
