"""Names the layer in whose forward a capture fails, in a ``NotCapturable``."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..hooks import ThreadHook


class NotCapturable(RuntimeError):
    """No CUDA graph can hold a network."""


@contextmanager
def naming_layers(backbone: nn.Module, *others: nn.Module) -> Iterator[None]:
    """Make an error in a forward of ``backbone``, or in one of another module's layers, say where a capture failed."""
    names = {module: name for each in (*others, backbone) for name, module in each.named_modules()}
    running: list[str] = []

    def enter(module: nn.Module, _inputs: Any) -> None:
        running.append(names[module])

    def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        running.pop()

    with ExitStack() as hooks:
        for module in names:
            hooks.callback(module.register_forward_pre_hook(ThreadHook(enter)).remove)
            hooks.callback(module.register_forward_hook(ThreadHook(leave)).remove)
        try:
            yield
        except torch.OutOfMemoryError:  # says what is wrong, and no layer is to blame
            raise
        except Exception as error:
            where = f"layer {running[-1]!r}" if running and running[-1] else "the backbone, outside its layers,"
            raise NotCapturable(
                f"backbone: {where} cannot be captured in a CUDA graph ({type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}); it may make the host wait, or branch on the value of a tensor. "
                "The eager runner runs it as it is"
            ) from error
