"""Accuracy at each exit by ways to train, on the digits: five seeds each, which draw splits, parameters and order.

python -m auxhead.autotune.studies.trainings --out trainings-digits.json

Ways that the file has already stay as they are.
"""

import json
import platform
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from ...model import EarlyExitNetwork, FusedAuxHead, Preprocessing, TrainingPlan, accuracy_of_exits, train
from ...model.basics.files import write_json
from ...model.basics.machine import package_version
from ...model.examples.train_save_load_run import make_backbone
from ...model.training.augment import AUGMENTATIONS
from ...model.training.batches import PixelBatches
from ...model.training.data_sets import Splits, read_splits
from ...model.training.sources import load_source

#: The value of ``format``.
FORMAT = "auxhead trainings 1"
SEEDS = range(5)
TAPS = {"block1": 64, "block2": 64}
USUAL = TrainingPlan(epochs=20, learning_rate=3e-3)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD as MSDNet is trained with (Huang et al. 2018): rate 0.1, Nesterov's momentum 0.9, weight decay 1e-4."""
    return torch.optim.SGD(parameters, 0.1, 0.9, weight_decay=1e-4, nesterov=True)


BY_SGD = TrainingPlan(epochs=20, optimizer=sgd)
#: By name, how images are changed at random, and the plan.
WAYS: dict[str, tuple[str, TrainingPlan]] = {
    "joint": ("shift", USUAL),
    **{f"augment {kind}": (kind, USUAL) for kind in AUGMENTATIONS if kind != "shift"},
    "label smoothing 0.1": ("shift", replace(USUAL, label_smoothing=0.1)),
    "ema 0.99": ("shift", replace(USUAL, ema=0.99)),
    "distill": ("shift", replace(USUAL, method="distill")),
    "gradients by depth": ("shift", replace(USUAL, gradients="depth")),
    "SGD": ("shift", BY_SGD),
    "SGD, gradients by depth": ("shift", replace(BY_SGD, gradients="depth")),
}


def accuracies(splits: Splits, augment: str, plan: TrainingPlan, seed: int) -> list[float]:
    """Train from a seed, keep the best epoch on the validation split, and return each exit's accuracy on the test."""
    torch.manual_seed(seed)
    network = EarlyExitNetwork(make_backbone(), {tap: FusedAuxHead(width, 10) for tap, width in TAPS.items()})
    cpu = torch.device("cpu")
    batches = PixelBatches(splits.train, 32, device=cpu, seed=seed, augment=augment)
    train(network, batches, plan, validation=PixelBatches(splits.validation, 256, device=cpu), seed=seed)
    return accuracy_of_exits(network.eval(), PixelBatches(splits.test, 256, device=cpu))


def main(out: Annotated[Path, typer.Option()]) -> None:
    """Train in all ways, and write the accuracies."""
    half = (0.5, 0.5, 0.5)
    ways: dict[str, Any] = json.loads(out.read_text())["ways"] if out.exists() else {}
    splits = {seed: read_splits(load_source(None), Preprocessing(16, 16, half, half), seed)[1] for seed in SEEDS}
    for name, (augment, plan) in WAYS.items():
        if name in ways:
            continue
        found = [accuracies(splits[seed], augment, plan, seed) for seed in SEEDS]
        settings = {**asdict(plan), "optimizer": "AdamW" if plan.optimizer is None else plan.optimizer.__name__}
        ways[name] = {"augment": augment, "plan": settings, "accuracy": found}
        means = torch.tensor(found).mean(0).tolist()
        print(name, [f"{mean:.2%}" for mean in means], flush=True)
    write_json(out, {
        "format": FORMAT,
        "data": "scikit-learn digits, 16x16 pixels; the test split",
        "exits": [*TAPS, "classifier"],
        "seeds": [*SEEDS],
        "torch": package_version("torch"),
        "system": f"{platform.system()} {platform.machine()}",
        "ways": ways,
    })  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
