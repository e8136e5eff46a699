"""The user's own model, and modules of its heads, named on the command line as ``package.module:factory``."""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..basics.arguments import close_names, kind_of
from ..basics.bad_input import BadInput
from ..network.early_exit_network import EarlyExitNetwork
from ..own_exits.attach_exits import attach_exits
from .errors import call_users


class UserModel(NamedTuple):
    """A network, made by a factory or of the model that it returned, and an input for it."""

    network: EarlyExitNetwork
    example_input: Tensor
    """A batch for it."""


def import_function(option: str, spec: str) -> Callable[[], Any]:
    """Find the function that an option names; the current directory is importable, as under ``python -m``.

    Args:
        option: as written on the command line, for messages.
        spec: ``package.module:name`` of something callable.

    Raises:
        BadInput: no such module, nothing callable of that name in it, or what takes arguments. Errors in the user's
            own code come through as they are, so that their traceback shows where.
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
    _check_takes_nothing(option, spec, function)
    return partial(call_users, function)


def _check_takes_nothing(option: str, spec: str, function: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some functions written in C
        return
    try:
        signature.bind()
    except TypeError:
        raise BadInput(f"{option}: {spec} takes arguments {signature}, wants a function without any") from None


def load_factory(spec: str) -> Callable[[], UserModel]:
    """Find the factory that ``--model`` names.

    Args:
        spec: ``package.module:name``, where ``name()`` returns an :class:`EarlyExitNetwork`, or a model with exits of
            its own (see :func:`attach_exits`), and a batch that it takes.

    Returns:
        The factory; calling it raises ``BadInput`` when it returns anything else, or a model whose exits are not found.

    Raises:
        BadInput: as :func:`import_function`.
    """
    factory = import_function("--model", spec)

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
                f"--model: {spec} returned ({got}), wants (EarlyExitNetwork, Tensor), or any model with exits"
            )
        model, x = made
        if x.ndim < 1 or len(x) == 0:
            raise BadInput(f"--model: {spec} returned an input of shape {list(x.shape)}, wants a batch of samples")
        if isinstance(model, EarlyExitNetwork):
            return UserModel(model, x)
        try:
            model.eval()
            return UserModel(attach_exits(model, x), x)
        except ValueError as error:
            raise BadInput(f"--model: {spec}: {error}") from None

    return checked


def is_of_torchvision(name: str) -> bool:
    """Return whether torchvision has a classifier of this name; its other models return no logits [N, K]."""
    if ":" in name:
        return False
    from torchvision import models  # takes a second: refusals need not wait for it

    return name in models.list_models(module=models)


def load_modules(spec: str) -> dict[str, nn.Module]:
    """Call the function that ``--modules`` names, and return the modules of heads that it makes, by tap.

    Args:
        spec: ``package.module:name``, where ``name()`` returns a dict of modules by tap.

    Raises:
        BadInput: as :func:`import_function`, or it returns anything else.
    """
    made = import_function("--modules", spec)()
    if not isinstance(made, Mapping):
        raise BadInput(f"--modules: {spec} returned {kind_of(made)}, wants a dict of modules by tap")
    for tap, module in made.items():
        if not isinstance(module, nn.Module):
            raise BadInput(f"--modules: {spec} returned {kind_of(module)} for {tap}, wants an nn.Module")
    return dict(made)
