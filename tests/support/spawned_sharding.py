"""Spawned processes that train a network that is sharded over them, by plain steps of PyTorch."""

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from auxhead.model import (
    EarlyExitNetwork,
    accuracy_of_exits,
    distillation_loss,
    joint_loss,
    load_checkpoint,
    save_checkpoint,
    train,
)
from support.trainable import Blocks, trainable
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

RANKS = 2
#: How a network is trained: all of it, in shards, by the loss of all exits or by distillation; or the heads, whole in
#: each process, on a frozen backbone in shards.
WAYS = ("joint", "distill", "heads")


def samples() -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(3)
    return torch.randn(16, 3, 8, 8, generator=numbers), torch.randint(0, 10, (16,), generator=numbers)


def made(way: str) -> EarlyExitNetwork:
    """The same in every process, and without batch norms, which would see each one's part alone."""
    network = trainable(norm=False)
    network.check_taps(samples()[0])
    network.set_rules(0.13)
    network.backbone.requires_grad_(way != "heads")
    return network


def loss_of(way: str, network: EarlyExitNetwork, images: Tensor, labels: Tensor) -> Tensor:
    logits = network.logits(images)
    if way == "distill":
        return distillation_loss(logits, labels)
    return joint_loss(logits[:-1] if way == "heads" else logits, labels)


def steps(way: str, network: EarlyExitNetwork, part: slice, whole: Sequence[nn.Parameter] = ()) -> None:
    """Train on a part of each batch; gradients of ``whole`` parameters are averaged over all processes here."""
    optimizer = torch.optim.AdamW([one for one in network.parameters() if one.requires_grad], lr=3e-3)
    images, labels = samples()
    network.train()
    for _ in range(5):
        loss_of(way, network, images[part], labels[part]).backward()
        for parameter in whole:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    network.eval()


def sharded(way: str) -> EarlyExitNetwork:
    network = made(way)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (network.backbone.first, network.backbone.second, network.backbone if way == "heads" else network):
        fully_shard(layer, mesh=mesh)
    register_fsdp_forward_method(network, "logits")  # which does nothing where the heads are whole
    return network


def refused(call: Any, *arguments: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        call(*arguments)
    return f"{type(caught.value).__name__}: {caught.value}"


def train_sharded(rank: int, folder: str) -> None:
    """Train in each way as one of the processes; a file gets what was found, and rank 0's folders what was saved."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", timedelta(seconds=60), RANKS, rank)
    found: dict[str, Any] = {}
    images, labels = samples()
    try:
        for way in WAYS:
            network = sharded(way)
            found["share"] = network.backbone.second[0].weight.to_local().numel()
            found["train"] = refused(train, network, [(images, labels)])
            found["save"] = refused(save_checkpoint, Path(folder, f"shards {rank}"), network)
            steps(way, network, slice(rank, None, RANKS), [*network.heads.parameters()] if way == "heads" else [])
            answer, accuracies = tuple(network(images)), accuracy_of_exits(network, [(images, labels)])
            state = get_model_state_dict(
                network, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
            )  # empty in all processes but rank 0
            found[way] = {"answer": answer, "accuracies": accuracies}
            if rank == 0:
                whole = made(way)
                whole.load_state_dict(state)
                save_checkpoint(Path(folder, way), whole)
                loaded = load_checkpoint(Path(folder, way), Blocks(norm=False)).network
                found[way] |= {"loaded": tuple(loaded(images)), "state": loaded.state_dict()}
    finally:
        dist.destroy_process_group()
    torch.save(found, Path(folder, f"{rank}.pt"))
