"""Trains and calibrates one backbone in each way, and tests what became of it by one and the same evaluation."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ...model import EarlyExitNetwork, FusedAuxHead, TrainingPlan, attach_exits, train
from ...model.calibration.evaluation import answers_of_all_exits, early_exit_answers
from ...model.demo.experiment import calibrate_demo
from ...model.training.data_sets import Splits
from ...model.training.pixel_batches import PixelBatches

#: Layers of earlyon's ResNet-20 with an exit behind them.
TAPS = ("stage1", "stage2", "stage3.0")
DEPTH = 20
IMAGE_SIZE, LARGEST_SHIFT, BATCH = 16, 1, 32


class Task(NamedTuple):
    """What all ways are given."""

    splits: Splits
    classes: int
    seed: int
    epochs: int
    max_accuracy_drop: float

    def batches(self) -> PixelBatches:
        """Return the training images, shuffled and shifted anew in every epoch, the same for all."""
        return PixelBatches(
            self.splits.train, BATCH, device=torch.device("cpu"), seed=self.seed, largest_shift=LARGEST_SHIFT
        )

    def backbone(self) -> nn.Module:
        """Return the backbone with the parameters of the seed."""
        from earlyon.models.cifar_resnet_ee import CifarResNet

        torch.manual_seed(self.seed)
        network: nn.Module = CifarResNet(n=(DEPTH - 2) // 6, num_classes=self.classes)
        return network

    def wrapper(self) -> Any:
        """Return the backbone with earlyon's heads, of one hidden layer each."""
        from earlyon.models import custom_ee

        shape = (1, 3, IMAGE_SIZE, IMAGE_SIZE)
        return custom_ee(self.backbone(), list(TAPS), self.classes, input_shape=shape)


def earlyon_two_stages(task: Task) -> EarlyExitNetwork:
    """Train the backbone, then its heads for as many epochs again: earlyon's default."""
    from earlyon.training import stage1_train_backbone, stage2_train_exits

    wrapper = task.wrapper()
    stage1_train_backbone(wrapper.backbone, task.batches(), epochs=task.epochs, on_epoch_end=_silent)
    stage2_train_exits(wrapper, task.batches(), epochs=task.epochs, on_epoch_end=_silent)
    return _calibrated_by_earlyon(wrapper, task)


def earlyon_jointly(task: Task) -> EarlyExitNetwork:
    """Train the backbone and its heads together, by earlyon."""
    from earlyon.training import joint_train_backbone_and_exits

    wrapper = task.wrapper()
    joint_train_backbone_and_exits(wrapper, task.batches(), epochs=task.epochs, on_epoch_end=_silent)
    return _calibrated_by_earlyon(wrapper, task)


def _calibrated_by_earlyon(wrapper: Any, task: Task) -> EarlyExitNetwork:
    """Let earlyon choose the thresholds, and take its network over."""
    from earlyon.core.thresholds import calibrate_thresholds

    images = task.splits.validation
    validation = PixelBatches(images, len(images.labels), device=torch.device("cpu"))
    calibrate_thresholds(wrapper.eval(), validation, target_accuracy_drop=task.max_accuracy_drop)
    return attach_exits(wrapper, _example(task))


def linear_heads(task: Task) -> EarlyExitNetwork:
    """Train the backbone and linear heads together, by this package."""
    heads = {tap: FusedAuxHead(None, task.classes) for tap in TAPS}
    return _trained(EarlyExitNetwork(task.backbone().eval(), heads, example_input=_example(task)), task)


def earlyons_heads(task: Task) -> EarlyExitNetwork:
    """Train the backbone and earlyon's heads together, by this package: the network is taken over untrained."""
    return _trained(attach_exits(task.wrapper().eval(), _example(task), rules=1.0), task)


def _trained(network: EarlyExitNetwork, task: Task) -> EarlyExitNetwork:
    train(network, task.batches(), TrainingPlan(epochs=task.epochs), seed=task.seed)
    calibrate_demo(network, task.splits.validation, task.max_accuracy_drop)
    return network


def _example(task: Task) -> torch.Tensor:
    return next(iter(PixelBatches(task.splits.validation, 2, device=torch.device("cpu"))))[0]


def _silent(_log: object) -> None:
    pass


#: What is compared, by the words of its row: trained by whom, and how.
WAYS: dict[str, Callable[[Task], EarlyExitNetwork]] = {
    "earlyon, two stages": earlyon_two_stages,
    "earlyon, jointly": earlyon_jointly,
    "auxhead, linear heads": linear_heads,
    "auxhead, earlyon's heads": earlyons_heads,
}


def work_at_exits(task: Task) -> list[float]:
    """Return the share of the backbone's work done at each exit, 0 to 1, as earlyon counts it; 1 at the last."""
    fractions = task.wrapper().flops_estimate.fractions
    return [*(fractions[tap] for tap in TAPS), 1.0]


def measured(task: Task, work: list[float]) -> Iterator[dict[str, Any]]:
    """Yield a row for each way: what early exit and each exit by itself say of the test split."""
    test = task.splits.test
    for way, make in WAYS.items():
        network = make(task)
        label, exits = early_exit_answers(network, test.pixels)
        alone = answers_of_all_exits(network, test.pixels).label == test.labels  # [E + 1, M]
        yield {
            "way": way,
            "seed": task.seed,
            "accuracy": (label == test.labels).double().mean().item(),
            "full_accuracy": alone[-1].double().mean().item(),
            "left_early": (exits < len(TAPS)).double().mean().item(),
            "mean_exit": exits.double().mean().item(),
            "mean_work": torch.tensor(work, dtype=torch.float64)[exits].mean().item(),
            "shares": (torch.bincount(exits, minlength=len(work)) / len(exits)).tolist(),
            "accuracy_of_exits": alone.double().mean(1).tolist(),
        }
