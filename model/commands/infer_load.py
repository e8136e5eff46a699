"""Loads the network of a checkpoint: its backbone is the user's, torchvision's or the demo's, heads may be, too."""

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..basics.bad_input import BadInput, one_line
from ..heads.module_head import ModuleHead
from ..network.early_exit_network import EarlyExitNetwork
from ..saving.checkpoint import Checkpoint, load_checkpoint
from ..saving.checkpoint_files import read_description
from .demo.saved import BACKBONE as DEMO
from .demo.saved import load_demo
from .user_model import import_function, is_of_torchvision, load_factory, load_modules

#: How checkpoints name a backbone of torchvision: this, and its name there.
TORCHVISION = "torchvision.models:"


def load_network(directory: Path, backbone: str | None, modules: str | None) -> Checkpoint:
    """Load a checkpoint.

    Args:
        directory: of the checkpoint.
        backbone: ``package.module:function``, which makes it, or a network with it and a batch, or the name of a
            network of torchvision; None for one that the checkpoint names and torchvision has, or the demo's. What a
            checkpoint names besides is never called.
        modules: ``package.module:function``, which makes the heads that are modules of the user's, by tap; None where
            there are none, or where the network has them that ``backbone`` makes.

    Raises:
        BadInput: what is there is no checkpoint, or its backbone or modules have to be given.
    """
    network: EarlyExitNetwork | None = None
    made: Any = None
    named = None
    if backbone is not None and is_of_torchvision(backbone):
        named, backbone = TORCHVISION + backbone, None
    if backbone is not None:
        made = import_function("--backbone", backbone)()
        if isinstance(made, tuple):  # a factory of `auxhead train --model`
            made = load_factory(backbone)().network
        if isinstance(made, EarlyExitNetwork):  # which may have other heads
            network, made = made, made.backbone
    given = None if modules is None else load_modules(modules)
    description = read_description(directory)
    named, classes = named or description["backbone"] or "", len(description["classes"])
    # those of a model with exits of its own are the model's
    described = {} if description["own_exits"] is not None and given is None else description["heads"]
    saved = {tap: head["module"] for tap, head in described.items() if "module" in head}
    by_tap = _modules_of(network, saved) if given is None else given
    _check_taps(directory, saved, by_tap, modules)
    if backbone is not None:
        return load_checkpoint(directory, made, modules=by_tap)
    if named == DEMO:
        return load_demo(directory)
    if not named.startswith(TORCHVISION):
        raise BadInput(
            f"checkpoint: {directory} does not name a backbone of torchvision, wants what makes its backbone: "
            f"--backbone {one_line(named or 'package.module:function')}; save_checkpoint(..., "
            f"backbone='{TORCHVISION}NAME', classes=[...]) names one there"
        )
    name = named.removeprefix(TORCHVISION)
    if not is_of_torchvision(name):
        raise BadInput(f"checkpoint: {directory} was saved with {named!r}, which this torchvision has not")
    if not classes:
        raise BadInput(f"checkpoint: {directory} has no names of classes, wants --backbone with a function of yours")
    from torchvision.models import get_model

    return load_checkpoint(directory, get_model(name, weights=None, num_classes=classes), modules=by_tap)


def _modules_of(network: EarlyExitNetwork | None, saved: Container[str]) -> dict[str, nn.Module]:
    """Return the modules that a network of the user's has for the heads that were saved without theirs."""
    heads = {} if network is None else dict(zip(network.taps, network.exit_heads, strict=True))
    return {tap: head.module for tap, head in heads.items() if tap in saved and isinstance(head, ModuleHead)}


def _check_taps(directory: Path, saved: Mapping[str, str], found: Mapping[str, nn.Module], spec: str | None) -> None:
    """Refuse modules for other heads than those that were saved without theirs, whose kinds ``saved`` has by tap."""
    wanted = ", ".join(saved) or "none: all heads of the checkpoint are fused"
    for tap in found:
        if tap not in saved:
            raise BadInput(f"--modules: {spec} returned a module for {tap!s:.60}, wants {wanted:.200}")
    for tap, kind in saved.items():
        if tap not in found:
            got = "got none" if spec is None else f"{spec} returned none"
            raise BadInput(
                f"--modules: {got} for the head at {tap!r:.60} in {directory}, a module of yours ({one_line(kind)}) of "
                "which the parameters alone were saved; wants package.module:function, which returns a dict of modules "
                f"for {wanted:.200}"
            )
