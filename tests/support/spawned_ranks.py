"""Spawned process of the tests of processes: answers with a shared network, and trains a copy with its parent."""

import copy
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from auxhead.model import EarlyExitNetwork, ExitRule, make_runner
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


class Logits(nn.Module):
    """The logits of all exits as one forward, which is what DistributedDataParallel wraps."""

    def __init__(self, network: EarlyExitNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.network.logits(x)


def loss_of(logits: list[Tensor], labels: Tensor) -> Tensor:
    return torch.stack([nn.functional.cross_entropy(one, labels) for one in logits]).sum()


def rules_of(network: EarlyExitNetwork) -> list[tuple[float, ...]]:
    """What the host says of each rule, and what a kernel reads."""
    return [
        (rule.threshold, rule.temperature, rule.threshold_tensor.item(), rule.temperature_tensor.item())
        for rule in (head.rule for head in network.fused_heads)
    ]


def answer_and_train(_index: int, network: EarlyExitNetwork, x: Tensor, labels: Tensor, folder: str) -> None:
    """Answer for ``x``, train a copy as rank 1, and change the rules of this process; a file gets what was found."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"answer": tuple(network(x)), "shared": network.backbone.fc.weight.is_shared()}
    found |= trained(1, copy.deepcopy(network), x, labels, folder)
    network.set_rules(ExitRule(0.125, temperature=8.0))
    torch.save(found, Path(folder) / "found.pt")


def trained(rank: int, network: EarlyExitNetwork, x: Tensor, labels: Tensor, folder: str) -> dict[str, Any]:
    """Train on this rank's samples of a batch, and return gradients of the first step, parameters and rules."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", rendezvous, timedelta(seconds=120), rank=rank, world_size=RANKS)
    try:
        return three_steps(network, x[rank::RANKS], labels[rank::RANKS])
    finally:
        dist.destroy_process_group()


def three_steps(network: EarlyExitNetwork, x: Tensor, labels: Tensor, *, parallel: bool = True) -> dict[str, Any]:
    """Train, under DistributedDataParallel without ``find_unused_parameters``; the process group is there."""
    logits = Logits(network.train())
    model = DistributedDataParallel(logits) if parallel else logits
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first: list[Tensor] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model(x), labels).backward()
        first = first or [parameter.grad.clone() for parameter in network.parameters()]
        optimizer.step()
    parameters = [parameter.detach() for parameter in network.parameters()]
    return {"gradients": first, "parameters": parameters, "rules": rules_of(network)}


def answer_on_the_gpu(_index: int, network: EarlyExitNetwork, x: Tensor, folder: str) -> None:
    """Answer with a network of the parent's memory, by the eager network and by a runner made here."""
    found = {"eager": tuple(one.cpu() for one in network(x))}
    with make_runner(network, x, batch_sizes=(len(x),), exits="overlapped") as runner:
        found["overlapped"] = tuple(one.cpu() for one in runner(x))
    network.set_rules(ExitRule(0.125, temperature=8.0))  # of this process alone
    torch.cuda.synchronize()
    torch.save(found, Path(folder) / "found.pt")
