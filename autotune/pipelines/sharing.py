"""Hands the first process's parameters and thresholds to all others of the benchmark, which have to have the same."""

from typing import Any

import torch
import torch.distributed as dist

from ...kernels import CRITERIA
from ..measuring.subject import Subject, thresholds_of_shares
from .plan import EXIT_CUT, LEAVE


def share_parameters(subject: Subject) -> None:
    """Give all processes the first one's network: batch norms' statistics differ from GPU to GPU in their last bits."""
    with torch.no_grad():
        for tensor in (*subject.network.parameters(), *subject.network.buffers()):
            dense: Any = tensor.detach().contiguous()
            dist.broadcast(dense, 0)
            tensor.copy_(dense)


def shared_thresholds(subject: Subject, batch: int) -> dict[int, list[float]]:
    """Return by percent the thresholds of all heads with which so many leave at the cut; the first process's.

    So many, or a few more, leave in the first ``batch`` samples of each input: one that stays more than a whole number
    of micro-batches would cost another one.
    """
    network = subject.network
    never = [CRITERIA[head.rule.criterion].high for head in subject.heads]
    place = network.taps.index(EXIT_CUT)
    found = {0: never}
    with torch.no_grad():
        logits = [network.logits(x[:batch])[place].double() for x in subject.inputs]
    temperature = subject.heads[place].rule.temperature
    confidences = [each.div(temperature).softmax(1).amax(1)[None] for each in logits]
    for percent in LEAVE:
        threshold = min(thresholds_of_shares(each, [percent])[0] for each in confidences)
        found[percent] = [threshold if index == place else high for index, high in enumerate(never)]
    shared = [found]
    dist.broadcast_object_list(shared, 0)
    return shared[0]
