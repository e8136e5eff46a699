"""Loads the network of a checkpoint, with a backbone of the user's, of torchvision or of the demo."""

from pathlib import Path

from ..bad_input import BadInput
from ..checkpoint import Checkpoint, load_checkpoint
from ..commands.user_model import import_function, load_factory
from ..demo.saved import load_demo
from ..description import read_description

#: How checkpoints name a backbone of torchvision: this, and its name there.
TORCHVISION = "torchvision.models:"


def load_network(directory: Path, backbone: str | None) -> Checkpoint:
    """Load a checkpoint.

    Args:
        directory: of the checkpoint.
        backbone: ``package.module:function``, which makes it, or a network with it and a batch; None for one that
            torchvision has, or the demo's. What a checkpoint names besides is never called.

    Raises:
        BadInput: what is there is no checkpoint, or its backbone has to be given.
    """
    if backbone is not None:
        made = import_function("--backbone", backbone)()
        if isinstance(made, tuple):  # a factory of `auxhead train --model`, whose network has other heads than saved
            made = load_factory(backbone)().network.backbone
        return load_checkpoint(directory, made)
    description = read_description(directory)
    named, classes = description["backbone"] or "", len(description["classes"])
    if not named.startswith(TORCHVISION):
        return load_demo(directory)
    from torchvision.models import get_model, list_models

    name = named.removeprefix(TORCHVISION)
    if name not in list_models():
        raise BadInput(f"checkpoint: {directory} was saved with {named!r}, which this torchvision has not")
    if not classes:
        raise BadInput(f"checkpoint: {directory} has no names of classes, wants --backbone with a function of yours")
    return load_checkpoint(directory, get_model(name, weights=None, num_classes=classes))
