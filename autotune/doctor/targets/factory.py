"""The user's module and its input, named ``package.module:factory``, as a request that can be run again and again."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from ....model.basics.arguments import kind_of
from ....model.basics.bad_input import BadInput
from ....model.commands.user_model import import_function
from ....model.listening.batches import call_with, map_tensors
from .user_errors import user_code


class Target(NamedTuple):
    """A request that can be run."""

    request: Callable[[], object]
    module: nn.Module | None
    """None: anything else that can be called."""


def find_target(spec: str) -> Callable[[torch.device], Target]:
    """Import the factory that ``package.module:factory`` names; what is returned calls it.

    Args:
        spec: ``factory()`` returns a module, or anything else that can be called, and an input for it: a tensor, a
            tuple of arguments or a dict of keyword arguments. Modules are put on the device, in eval mode, tensors of
            the input too; they are called without gradients.

    Raises:
        BadInput: no such factory, one that takes arguments, or, once it is called, one that returns anything else.
        UserCodeError: importing it, calling it or, later, a request raises an error.
    """
    with user_code(f"TARGET: {spec}: importing {spec.partition(':')[0]}"):
        factory = import_function("TARGET", spec)

    def make(device: torch.device) -> Target:
        with user_code(f"TARGET: {spec}"):
            made = factory()
        if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
            got = ", ".join(map(kind_of, made)) if isinstance(made, tuple) else kind_of(made)
            raise BadInput(f"TARGET: {spec} returned ({got}), wants (an nn.Module or a function, an input for it)")
        called, x = made
        module = called.to(device).eval() if isinstance(called, nn.Module) else None
        x = map_tensors(x, lambda each: each.to(device))

        def request() -> object:
            with user_code(f"TARGET: {spec}: a request"), torch.no_grad():
                return call_with(called, x)

        return Target(request, module)

    return make
