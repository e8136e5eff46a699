"""The networks of commands: the user's own, by the name of a function, and those of checkpoints."""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..basics.arguments import close_names, kind_of
from ..basics.bad_input import BadInput, one_line
from ..heads.module_head import ModuleHead
from ..network.early_exit_network import EarlyExitNetwork
from ..own_exits.attach_exits import attach_exits
from ..saving.checkpoint import Checkpoint, load_checkpoint
from ..saving.checkpoint_files import read_description
from .errors import call_users
from .small_resnet import BACKBONE as SMALL_RESNET
from .small_resnet import resnet18_small

#: Kinds of parameters that need not be given.
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class UserModel(NamedTuple):
    """A network, made by a factory or of the model that it returned, and an input for it."""

    network: EarlyExitNetwork
    example_input: Tensor
    """A batch for it."""


def import_function(option: str, spec: str) -> Callable[[], Any]:
    """Find the function that an option names; the current directory is importable, as under ``python -m``.

    ``BadInput`` unless ``spec`` is ``package.module:name`` of something callable without arguments. Errors in the
    user's own code come through as they are, so that their traceback shows where.
    """
    module_name, colon, name = spec.partition(":")
    if not (colon and name and all(part.isidentifier() for part in module_name.split("."))):
        or_named = ", or a classifier of torchvision.models by name" if option == "--backbone" else ""
        raise BadInput(f"{option}: got {spec!r}, wants package.module:function{or_named}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        module = call_users(partial(importlib.import_module, module_name))
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise  # the user's module is there, and lacks one of its own
        meant = f"; did you mean {module_name.removesuffix('.py')}:{name}?" if module_name.endswith(".py") else ""
        raise BadInput(f"{option}: no module {missing!r} in {here} or among the installed packages{meant}") from None
    function = getattr(module, name, None)
    if not callable(function):
        what = "which cannot be called" if hasattr(module, name) else "which it does not have"
        close = close_names(name, (other for other, value in vars(module).items() if callable(value)))
        raise BadInput(f"{option}: got {name!r} of {module_name} ({module.__file__}), {what}; wants a function{close}")
    signature = inspect.Signature()
    with suppress(TypeError, ValueError):  # of some functions written in C
        signature = inspect.signature(function)
    if any(one.default is one.empty and one.kind not in _OPEN for one in signature.parameters.values()):
        raise BadInput(f"{option}: {spec} takes arguments {signature}, wants a function without any")
    return partial(call_users, function)


def load_factory(spec: str, option: str = "--model") -> Callable[[], UserModel]:
    """Find the factory that an option names, a function that returns a network and a batch that it takes.

    The network is an :class:`EarlyExitNetwork`, or a model with exits of its own (see :func:`attach_exits`). Calling
    the factory raises ``BadInput`` when it returns anything else, or a model whose exits are not found.
    """
    factory = import_function(option, spec)

    def checked() -> UserModel:
        made = factory()
        if not (
            isinstance(made, tuple)
            and len(made) == 2
            and isinstance(made[0], nn.Module)
            and isinstance(made[1], Tensor)
        ):
            got = ", ".join(type(part).__name__ for part in made) if isinstance(made, tuple) else type(made).__name__
            raise BadInput(
                f"{option}: {spec} returned ({got}), wants (EarlyExitNetwork, Tensor), or any model with exits"
            )
        model, x = made
        if x.ndim < 1 or len(x) == 0:
            raise BadInput(f"{option}: {spec} returned an input of shape {list(x.shape)}, wants a batch of samples")
        if isinstance(model, EarlyExitNetwork):
            return UserModel(model, x)
        try:
            model.eval()
            return UserModel(attach_exits(model, x), x)
        except ValueError as error:
            raise BadInput(f"{option}: {spec}: {error}") from None

    return checked


def is_of_torchvision(name: str) -> bool:
    """Return whether torchvision has a classifier of this name; its other models return no logits [N, K]."""
    if ":" in name:
        return False
    from torchvision import models  # takes a second: refusals need not wait for it

    return name in models.list_models(module=models)


def load_modules(spec: str) -> dict[str, nn.Module]:
    """Call the function that ``--modules`` names, and return the modules of heads that it makes, by tap."""
    made = import_function("--modules", spec)()
    if not isinstance(made, Mapping):
        raise BadInput(f"--modules: {spec} returned {kind_of(made)}, wants a dict of modules by tap")
    for tap, module in made.items():
        if not isinstance(module, nn.Module):
            raise BadInput(f"--modules: {spec} returned {kind_of(module)} for {tap}, wants an nn.Module")
    return dict(made)


#: How checkpoints name a backbone of torchvision or timm: this, and its name there.
TORCHVISION, TIMM = "torchvision.models:", "timm:"


def named_backbone(named: str, classes: int, channels: int, option: str) -> nn.Module:
    """Make a backbone of torchvision or timm, freshly initialised, for so many classes and channels.

    ``BadInput`` for another name, and where timm is not installed.
    """
    library, _, name = named.rpartition(":")
    if library == TIMM[:-1]:
        try:
            import timm
        except ImportError:
            raise BadInput(f"{option}: {named} wants timm, which is not installed: pip install timm") from None
        if "/" in name or not timm.is_model(name):
            raise BadInput(
                f"{option}: got {named!r:.100}, which this timm has not{close_names(name, timm.list_models())}"
            )
        try:
            made: nn.Module = timm.create_model(name, num_classes=classes, in_chans=channels)
        except RuntimeError as error:  # a tag that it has not, say
            raise BadInput(f"{option}: {named:.100}: {one_line(error)}") from None
        return made
    if named != TORCHVISION + name or not is_of_torchvision(name):
        raise BadInput(f"{option}: got {named!r:.100}, which this torchvision has not")
    from torchvision.models import get_model

    backbone = get_model(name, weights=None, num_classes=classes)
    if channels != 3:
        _take_channels(backbone, channels)
    return backbone


def _take_channels(backbone: nn.Module, channels: int) -> None:
    """Put a first convolution of other channels into a backbone of torchvision, whose first layer is one."""
    name, first = next((name, one) for name, one in backbone.named_modules() if isinstance(one, nn.Conv2d))
    parent = backbone.get_submodule(name.rpartition(".")[0])
    setattr(parent, name.rpartition(".")[2], nn.Conv2d(
        channels, first.out_channels, first.kernel_size, first.stride, first.padding, first.dilation,  # type: ignore[arg-type]
        first.groups, first.bias is not None,
    ))  # fmt: skip


def load_network(command: str, directory: Path, backbone: str | None, modules: str | None) -> Checkpoint:
    """Load a checkpoint.

    Args:
        command: that loads it, ``auxhead calibrate`` say, for errors that tell what to write.
        directory: of the checkpoint.
        backbone: ``package.module:function``, which makes it, or a network with it and a batch, or the name of a
            network of torchvision; None for one that the checkpoint names and torchvision has, or the demo's. What a
            checkpoint names besides is never called.
        modules: ``package.module:function``, which makes the heads that are modules of the user's, by tap; None where
            there are none, or where the network has them that ``backbone`` makes.
    """
    network: EarlyExitNetwork | None = None
    made: Any = None
    named = None
    if backbone is not None and (backbone.startswith(TIMM) or is_of_torchvision(backbone)):
        named, backbone = backbone if backbone.startswith(TIMM) else TORCHVISION + backbone, None
    if backbone is not None:
        made = import_function("--backbone", backbone)()
        if isinstance(made, tuple):  # a factory of `auxhead train --model`
            made = load_factory(backbone, "--backbone")().network
        if isinstance(made, EarlyExitNetwork):  # which may have other heads
            network, made = made, made.backbone
    given = None if modules is None else load_modules(modules)
    description = read_description(directory)
    named, classes = named or description["backbone"] or "", len(description["classes"])
    # those of a model with exits of its own are the model's
    described = {} if description["own_exits"] is not None and given is None else description["heads"]
    saved = {tap: head["module"] for tap, head in described.items() if "module" in head}
    by_tap = given
    if by_tap is None:  # the network's own
        heads = {} if network is None else dict(zip(network.taps, network.exit_heads, strict=True))
        by_tap = {tap: head.module for tap, head in heads.items() if tap in saved and isinstance(head, ModuleHead)}
    _check_taps(directory, saved, by_tap, modules)
    if backbone is not None:
        loaded = load_checkpoint(directory, made, modules=by_tap)
        if network is not None and loaded.network.preprocessing is None:
            loaded.network.preprocessing = network.preprocessing
        return loaded
    channels = 3 if description["preprocessing"] is None else description["preprocessing"]["channels"]
    option = f"checkpoint: {directory}" if named == description["backbone"] else "--backbone"
    known = _known_backbone(f"{command} {directory}", named, classes, channels, option)
    return load_checkpoint(directory, known, modules=by_tap)


def _known_backbone(command: str, named: str, classes: int, channels: int, option: str) -> nn.Module:
    """Make the backbone that a checkpoint or option names, of torchvision, timm or the demo; ``BadInput`` otherwise."""
    if named == SMALL_RESNET:
        return resnet18_small(classes).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if not named.startswith((TORCHVISION, TIMM)):
        raise BadInput(
            f"{option if named else 'checkpoint'} does not name a backbone of torchvision or timm, wants what makes "
            f"its backbone: {command} --backbone {one_line(named or 'resnet18, or package.module:function')}; "
            f"save_checkpoint(..., backbone='{TORCHVISION}NAME', classes=[...]) names one there"
        )
    if not classes:
        wants = f"a function of yours: {command} --backbone package.module:function"
        raise BadInput(f"checkpoint: it has no names of classes, by which {named} would be made; wants {wants}")
    return named_backbone(named, classes, channels, option)


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
