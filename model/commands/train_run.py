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

from ..attach import attach
from ..basics.bad_input import BadInput, one_line
from ..basics.files import naming
from ..basics.images import MEAN, STD
from ..listening.batches import NotTaken
from ..network.early_exit_network import EarlyExitNetwork
from ..network.learned_from import LearnedFrom, fingerprint
from ..processes.dealing import agree
from ..processes.process_group import own_rank, ranks
from ..saving.checkpoint import save_checkpoint
from ..training.batches import PixelBatches
from ..training.data_sets import LabelledImages, Split, Splits, load_source, read_splits
from ..training.learners import accuracy_of_exits
from ..training.plan import TrainingPlan, epochs_for
from ..training.train import Epoch, LossNotFinite, Step, Training, train
from .console import PhaseProgress
from .options import check_output_directory, make_output_directory
from .user_model import is_of_torchvision, load_factory

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
    plan = TrainingPlan(
        method=asked.method, learning_rate=asked.learning_rate, precision=asked.precision,
        accumulate=asked.accumulate, patience=asked.patience,
    )  # fmt: skip
    _check_options(asked)
    source = load_source(asked.data, asked.dataset, asked.root)
    agree(lambda: {"images": source.facts()})
    network, image_size = _make_network(asked, len(source.classes))
    network.to(device)
    console.print(
        f"{len(source.labels):,} images of {source.name}, {len(source.classes)} classes, {image_size}x{image_size} "
        f"pixels; {len(network.taps)} heads, {plan.method}, on {device}\n{network.describe()}",
        soft_wrap=True,
    )
    with PhaseProgress(console) as start_phase:
        advance = start_phase("reading images", len(source.open))
        source, splits = read_splits(
            source, image_size, asked.seed, skip_damaged=asked.skip_damaged,
            tell=lambda lines: console.print(lines, soft_wrap=True), on_image=lambda: advance(1, ""),
        )  # fmt: skip
        if own_rank() == 0:  # which alone reads and writes there; another host has another disk
            make_output_directory(asked.out)
        images = len(splits.train.labels)
        batch_size = min(asked.batch_size, images // ranks() * ranks())
        plan = replace(plan, epochs=asked.epochs or epochs_for(images, batch_size))
        failed = None
        with _log(asked, network) as on_epoch:
            try:
                done = train_on_pixels(
                    network, splits.train, plan, batch_size, image_size, asked.seed, start_phase,
                    validation=in_order(splits.validation, network), state=asked.out / STATE, resume=asked.resume,
                    on_epoch=on_epoch,
                )  # fmt: skip
            except LossNotFinite as error:
                done, failed = error.done, error
    if own_rank() == 0 and done.epochs:
        _save(console, asked, network.eval(), source, splits, image_size, done)
    if failed is not None:
        raise failed


def _check_options(asked: SimpleNamespace) -> None:
    if own_rank() == 0:
        check_output_directory(asked.out)
    if (asked.model is None) == (asked.backbone is None):
        raise BadInput("--model: wants a network, by either --model or --backbone")
    if asked.model is not None and asked.tap:
        raise BadInput("--tap: belongs to --backbone; the network of --model has its heads")
    if asked.method == "heads" and asked.backbone is not None:
        raise BadInput("--method: heads wants a backbone that is trained already: give yours with --model")
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


def _make_network(asked: SimpleNamespace, classes: int) -> tuple[EarlyExitNetwork, int]:
    """Return the network, freshly initialised by the seed, and the size of its images."""
    with torch.random.fork_rng():
        torch.manual_seed(asked.seed)
        if asked.model is not None:
            network, example = load_factory(asked.model)()
            shape = list(example.shape)
            if len(shape) != 4 or shape[1] != 3 or shape[2] != shape[3]:
                raise BadInput(f"--model: {asked.model} returned a batch {shape}, wants [N, 3, size, size]")
            network.check_taps(example)
            found = network.exit_heads[0].num_classes
            if found != classes:
                raise BadInput(f"--model: {asked.model} has {found} classes, wants {classes}, as the images have")
            return network, asked.image_size or example.shape[-1]
        size = asked.image_size or 224
        return _attach(str(asked.backbone), asked.tap, classes, size), size


def _attach(name: str, taps: list[str] | None, classes: int, size: int) -> EarlyExitNetwork:
    if not is_of_torchvision(name):
        yours = "; a function of yours is --model" if ":" in name else ""
        raise BadInput(f"--backbone: got {name!r}, wants a classifier of torchvision.models, resnet18 say{yours}")
    from torchvision.models import get_model

    try:
        backbone = get_model(name, weights=None, num_classes=classes)
        network = attach(backbone, taps or "auto", example_input=torch.zeros(2, 3, size, size))
    except NotTaken as error:
        why = one_line(error.__cause__)
        raise BadInput(f"--image-size: {name} cannot take {size} pixels: {why}") from None
    except (ValueError, TypeError) as error:
        raise BadInput(f"--tap: {name} with {', '.join(taps or ()) or 'none'}: {error}") from None
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # trains a tenth faster
    network.learned_from = LearnedFrom(None, fingerprint(network))  # nothing yet
    return network


def train_on_pixels(
    network: EarlyExitNetwork,
    split: Split,
    plan: TrainingPlan,
    batch_size: int,
    image_size: int,
    seed: int,
    start_phase: StartPhase,
    **more: Any,
) -> Training:
    """Train on shifted images of a split, with progress; ``more`` goes to :func:`train`.

    Of the method "heads", whose images go through the backbone once, these are as they are.
    """
    heads_alone = plan.method == "heads"
    try:
        batches = PixelBatches(
            split, batch_size, device=network.device, seed=None if heads_alone else seed,
            largest_shift=0 if heads_alone else image_size // 16,
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
    source: LabelledImages,
    splits: Splits,
    image_size: int,
    done: Training,
) -> None:
    """Write the checkpoint, and print the accuracy of every exit on the validation split."""
    found = accuracy_of_exits(network, in_order(splits.validation, network))
    accuracy = dict(zip([*network.taps, "classifier"], found, strict=True))
    made_by = asked.model or f"torchvision.models:{asked.backbone}"
    save_checkpoint(
        asked.out, network, backbone=made_by, classes=source.classes, image_size=image_size,
        mean=MEAN, std=STD, accuracy={f"validation of {name}": share for name, share in accuracy.items()},
    )  # fmt: skip
    table = Table(title=f"Validation split: {len(splits.validation.labels):,} images, each exit answering for all")
    table.add_column("exit")
    table.add_column("accuracy", justify="right")
    for name, share in accuracy.items():
        table.add_row(name, f"{share:.1%}")
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
    loss, looked, begun = 0.0, -math.inf, False

    def on_step(step: Step) -> None:
        nonlocal loss, looked, begun
        if time.monotonic() > looked + _BETWEEN_LOOKS:
            loss, looked = step.loss.item(), time.monotonic()
        before = 0 if begun else step.epoch * images_an_epoch
        begun = True
        advance(before + step.images, f"epoch {step.epoch + 1} of {epochs}, loss {loss:.2f}")

    return on_step
