"""Networks that are monitored, and what a monitor has to have counted."""

import torch
from auxhead.kernels.reference.criteria import TALLY_BINS
from auxhead.model import EarlyExitNetwork, ExitMonitor, ExitResult
from support.exits_plan_cases import make_network

SHARES = (0.25, 0.25, 0.25, 0.25)


def monitored(device: str = "cpu") -> EarlyExitNetwork:
    """Two of the first eight images leave at each of its exits."""
    net = make_network(device)
    net.monitor = ExitMonitor(SHARES, 1000)
    return net


def histogram_of(*answers: ExitResult) -> torch.Tensor:
    """One by one."""
    counted = torch.zeros(4, TALLY_BINS, dtype=torch.int64)
    for answer in answers:
        for index, confidence in zip(answer.exit_index.tolist(), answer.confidence.tolist(), strict=True):
            counted[index, min(TALLY_BINS - 1, int(confidence * TALLY_BINS))] += 1
    return counted


def counted_again(net: EarlyExitNetwork) -> torch.Tensor:
    assert net.monitor is not None
    found = net.monitor.histogram()
    net.monitor.reset()
    assert net.monitor.counts().tolist() == [0, 0, 0, 0]
    return found
