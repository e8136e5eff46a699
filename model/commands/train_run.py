"""One run of ``auxhead train``: from options to a checkpoint and a table of accuracies."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..basics.bad_input import BadInput
from ..basics.files import naming
from ..network.early_exit_network import EarlyExitNetwork
from ..processes.dealing import agree
from ..processes.process_group import own_rank, ranks
from ..saving.checkpoint import save_checkpoint
from ..training.batches import PixelBatches
from ..training.data_sets import Split, Splits, read_splits
from ..training.learners import accuracy_of_exits
from ..training.plan import TrainingPlan, epochs_for
from ..training.sources import LabelledImages, load_source
from ..training.train import train
from ..training.training_loop import Epoch, LossNotFinite, Step, Training
from .console import PhaseProgress
from .options import check_output_directory, make_output_directory
from .train_network import make_network

#: Begins a phase of so many images for a progress bar; returns a function that counts images as done, with a remark.
StartPhase = Callable[[str, int], Callable[[int, str], None]]
#: The file in ``--out`` that ``--resume`` reads.
STATE = "training.safetensors"


def run_training(console: Console, asked: SimpleNamespace, device: torch.device) -> None:
    """Read images, make the network, train it, save it, and print how its exits do; of several processes rank 0 does.

    ``asked`` has the options of ``auxhead train`` by their names. ``BadInput`` for options that contradict each other,
    images that cannot be read, and a network that does not fit them.
    """
    console.quiet = own_rank() > 0
    _check_options(asked)
    usual = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    plan = TrainingPlan(
        method=asked.method, gradients=asked.gradients, learning_rate=asked.learning_rate,
        precision=asked.precision or usual, accumulate=asked.accumulate, patience=asked.patience,
        label_smoothing=asked.label_smoothing, ema=asked.ema,
    )  # fmt: skip
    source = load_source(asked.data)
    agree(lambda: {"images": source.facts()})
    network, made_by, said = make_network(asked, source)
    network.to(device)
    assert network.preprocessing is not None
    console.print(
        f"{len(source.labels):,} images of {source.name}, {len(source.classes)} classes; {len(network.taps)} heads, "
        f"{plan.method}, on {device}\n{said}{network.describe()}",
        soft_wrap=True,
    )
    with PhaseProgress(console) as start_phase:
        advance = start_phase("reading images", len(source.open))
        source, splits = read_splits(
            source, network.preprocessing, asked.seed, skip_damaged=asked.skip_damaged,
            tell=lambda lines: console.print(lines, soft_wrap=True), on_image=lambda: advance(1, ""),
        )  # fmt: skip
        if own_rank() == 0:  # which alone reads and writes there; another host has another disk
            make_output_directory(asked.out)
        images = len(splits.train.labels)
        batch_size = min(asked.batch_size, images // ranks() * ranks())
        plan = replace(plan, epochs=asked.epochs or epochs_for(images, batch_size))
        console.print(_settings(asked, plan, splits, batch_size), soft_wrap=True)
        failed = None
        with _log(asked, network) as on_epoch:
            try:
                done = train_on_pixels(
                    network, splits.train, plan, batch_size, asked.seed, start_phase, asked.augment or "shift",
                    validation=in_order(splits.validation, network), state=asked.out / STATE, resume=asked.resume,
                    on_epoch=on_epoch,
                )  # fmt: skip
            except LossNotFinite as error:
                done, failed = error.done, error
    if own_rank() == 0 and done.epochs:
        _save(console, asked, network.eval(), made_by, source, splits, done)
    if failed is not None:
        raise failed


def _settings(asked: SimpleNamespace, plan: TrainingPlan, splits: Splits, batch_size: int) -> str:
    """Say in a line what is trained with, and on how many images."""
    train, validation, test = (len(split.labels) for split in splits)
    used = train // batch_size * batch_size
    augment = "as they are" if asked.method == "heads" else asked.augment or "shift"
    more = ["losses by depth"] if plan.gradients == "depth" else []
    more += [f"label smoothing {plan.label_smoothing:g}"] if plan.label_smoothing else []
    more += [f"average of {plan.ema:g}"] if plan.ema is not None else []
    said = [f"method {plan.method}", f"{plan.epochs} epochs", f"AdamW up to {plan.learning_rate:g}", plan.precision]
    return (
        f"{train:,} images to train with, {used:,} an epoch in batches of {batch_size}; {validation:,} for validation, "
        f"{test:,} left for a test\n{', '.join([*said, f'images {augment}', *more])}"
    )


def _check_options(asked: SimpleNamespace) -> None:
    if own_rank() == 0:
        check_output_directory(asked.out)
    if (asked.model is None) == (asked.backbone is None):
        raise BadInput("--model: wants a network, by either --model or --backbone")
    if asked.model is not None and asked.tap:
        raise BadInput("--tap: belongs to --backbone; the network of --model has its heads")
    if asked.method == "heads" and asked.augment is not None:
        raise BadInput("--augment: does nothing with --method heads, which reads each image once; wants --method joint")
    if asked.method == "heads" and asked.gradients == "depth":
        raise BadInput("--gradients: depth does nothing with --method heads, whose exits share nothing that learns")
    if asked.weights is not None and asked.backbone is None:
        raise BadInput("--weights: belongs to --backbone; the network of --model has its own")
    if asked.channels == 2:
        raise BadInput("--channels: got 2, wants 3 for RGB or 1 for grey pictures")
    if asked.method == "heads" and asked.backbone is not None and asked.weights is None:
        wants = "--weights DEFAULT or a file of yours, or your network by --model"
        raise BadInput(f"--method: heads wants a backbone that is trained already: {wants}")
    if asked.method == "heads" and ranks() > 1:
        raise BadInput("--method: heads takes seconds in one process; wants no torchrun")
    if own_rank() == 0 and asked.resume and not (asked.out / STATE).exists():
        raise BadInput(f"--resume: {asked.out} has no {STATE}, wants what the same command left there")


@contextmanager
def _log(asked: SimpleNamespace, network: EarlyExitNetwork) -> Iterator[Callable[[Epoch], object]]:
    """Yield what writes each epoch for TensorBoard, if that is asked for, and close it at the end."""
    if not asked.tensorboard or own_rank() > 0:
        yield lambda epoch: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise BadInput("--tensorboard: it is not installed: pip install 'auxhead[tensorboard]'") from None
    directory = asked.out / "tensorboard"
    writer = SummaryWriter(str(directory))

    def write(epoch: Epoch) -> None:
        exits = zip([*network.taps, "classifier"], epoch.accuracy or (), strict=False)
        values = {"loss": epoch.loss, "learning_rate": epoch.learning_rate}
        values |= {f"accuracy/{name}": share for name, share in exits}
        with naming(directory):
            for name, value in values.items():
                writer.add_scalar(name, value, epoch.epoch)
            writer.flush()

    try:
        yield write
    finally:
        writer.close()


def train_on_pixels(
    network: EarlyExitNetwork,
    split: Split,
    plan: TrainingPlan,
    batch_size: int,
    seed: int,
    start_phase: StartPhase,
    augment: str = "shift",
    **more: Any,
) -> Training:
    """Train on images of a split, changed at random, with progress; ``more`` goes to :func:`train`.

    Of the method "heads", whose images go through the backbone once, these are as they are.
    """
    heads_alone = plan.method == "heads"
    try:
        batches = PixelBatches(
            split, batch_size, device=network.device, seed=None if heads_alone else seed,
            augment="none" if heads_alone else augment,
        )  # fmt: skip
    except ValueError as error:
        raise BadInput(f"--batch-size: {str(error).removeprefix('batch_size: ')}") from None
    images = len(split.labels) // batch_size * batch_size
    advance = start_phase("training, all epochs", images * plan.epochs)
    return train(network, batches, plan, seed=seed, on_step=show_steps(advance, plan.epochs, images), **more)


def in_order(split: Split, network: EarlyExitNetwork) -> PixelBatches:
    """Return all images of a split in order, in batches of 256 at most."""
    return PixelBatches(split, min(256, len(split.labels)), device=network.device)


def _save(
    console: Console,
    asked: SimpleNamespace,
    network: EarlyExitNetwork,
    made_by: str,
    source: LabelledImages,
    splits: Splits,
    done: Training,
) -> None:
    """Write the checkpoint, and print the accuracy of every exit on the validation split."""
    found = accuracy_of_exits(network, in_order(splits.validation, network))
    accuracy = dict(zip([*network.taps, "classifier"], found, strict=True))
    shares = {f"validation of {name}": share for name, share in accuracy.items()}
    save_checkpoint(asked.out, network, backbone=made_by, classes=source.classes, accuracy=shares)
    table = Table(title=f"Validation split: {len(splits.validation.labels):,} images, each exit answering for all")
    table.add_column("exit")
    table.add_column("accuracy", justify="right")
    for index, (name, share) in enumerate(accuracy.items()):
        table.add_row(f"{index}: {name}", f"{share:.1%}")
    console.print(table)
    console.print(
        f"As after epoch {done.best + 1} of {len(done.epochs)}, the best. No head exits yet: thresholds come next.\n"
        f"Saved in {asked.out}: model.json and its parameters, {STATE} (for --resume)",
        soft_wrap=True,
    )


#: Seconds between two looks at the loss, each of which waits for the device.
_BETWEEN_LOOKS = 0.5


def show_steps(advance: Callable[[int, str], None], epochs: int, images_an_epoch: int) -> Callable[[Step], None]:
    """Return an ``on_step`` for :func:`train` that counts images as done; of a resumed training those before, too."""
    loss, looked, begun, epoch = 0.0, -math.inf, False, -1

    def on_step(step: Step) -> None:
        nonlocal loss, looked, begun, epoch
        if time.monotonic() > looked + _BETWEEN_LOOKS or step.epoch > epoch:  # of features an epoch takes no time
            loss, looked, epoch = step.loss.item(), time.monotonic(), step.epoch
        before = 0 if begun else step.epoch * images_an_epoch
        begun = True
        advance(before + step.images, f"epoch {step.epoch + 1} of {epochs}, loss {loss:.2f}")

    return on_step
