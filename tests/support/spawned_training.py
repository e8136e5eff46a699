"""Spawned processes that train a network together, each on its part of every batch."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from auxhead.model import TrainingPlan, train
from auxhead.model.training.batches import PixelBatches
from auxhead.model.training.training_loop import Epoch
from support.trainable import digits, images, part_of, tensors, trainable
from torch.utils.data import DataLoader, DistributedSampler

RANKS = 2
PLAN = TrainingPlan(epochs=2, learning_rate=1e-2, accumulate=2)


class Stopped(Exception):
    """Ends a training behind its first epoch."""


def stop(epoch: Epoch) -> None:
    if epoch.epoch == 0:
        raise Stopped


def trained(*, norm: bool, on_epoch: Any = lambda epoch: None, **options: Any) -> Any:
    """Train on batches of 16 digits, five an epoch, of all processes together; returns tensors and epochs."""
    split = part_of(digits()[0], slice(80))
    batches = PixelBatches(split, 16, device=torch.device("cpu"), seed=5, augment="shift")
    network = trainable(norm=norm, seed=0 if not dist.is_initialized() else dist.get_rank())
    validation = DataLoader(images(digits()[1], 60), 20)
    done = train(network, batches, PLAN, validation=validation, seed=1, on_epoch=on_epoch, **options)
    return tensors(network), done


def trained_by_sampler() -> Any:
    """Train heads alone, on a DistributedSampler's images; returns tensors, images of each step and what was noted."""
    data = images(digits()[0], 64)
    loader = DataLoader(data, 8, sampler=DistributedSampler(data, seed=2))
    seen: list[int] = []
    network = trainable()
    train(network, loader, TrainingPlan("heads", epochs=2), on_step=lambda step: seen.append(step.images))
    return tensors(network), seen, network.learned_from.parts[0].hashes


def trained_in_two_parts(state: Path) -> Any:
    """Train, stop, and go on."""
    try:
        trained(norm=True, state=state, on_epoch=stop)
    except Stopped:
        return trained(norm=True, state=state, resume=True)


def train_together(rank: int, folder: str) -> None:
    """Train as one of the processes; a file gets what was found."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", timedelta(seconds=120), RANKS, rank)
    try:
        found = {
            "plain": trained(norm=False),
            "norm": trained(norm=True),
            "resumed": trained_in_two_parts(Path(folder, "state.safetensors")),
            "sampler": trained_by_sampler(),
        }
    finally:
        dist.destroy_process_group()
    torch.save(found, Path(folder, f"{rank}.pt"))
