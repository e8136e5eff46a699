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


def shared_thresholds(subject: Subject) -> dict[int, list[float]]:
    """Return by percent the thresholds of all heads with which so many leave at the cut; the first process's."""
    network = subject.network
    never = [CRITERIA[head.rule.criterion].high for head in subject.heads]
    place = network.taps.index(EXIT_CUT)
    found = {0: never}
    with torch.no_grad():
        logits = torch.cat([network.logits(x)[place].double() for x in subject.inputs])
    confidence = logits.div(subject.heads[place].rule.temperature).softmax(1).amax(1)[None]
    for percent in LEAVE:
        [threshold] = thresholds_of_shares(confidence, [percent])
        found[percent] = [threshold if index == place else high for index, high in enumerate(never)]
    shared = [found]
    dist.broadcast_object_list(shared, 0)
    return shared[0]
