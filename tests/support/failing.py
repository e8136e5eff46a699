"""Lets the n-th allocation of a call fail for lack of memory, or its n-th step: a layer's hook, a launch."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Call = Callable[[], object]


class Failure(Exception):
    """What a user's code raises, and nothing else does."""


# Allocations


def allocations(call: Call) -> int:
    """Call, and return how many operators have allocated memory."""
    with _Allocations(None) as mode:
        call()
    return mode.count


def out_of_memory_at(n: int, call: Call) -> bool:
    """Call, with no memory for the operator that is the n-th to allocate, from 0; return whether that came out."""
    try:
        with _Allocations(n):
            call()
    except torch.OutOfMemoryError as error:
        assert str(error).startswith(_OUT_OF_MEMORY), error
        return True
    return False


_OUT_OF_MEMORY = "CUDA out of memory, for this test"


class _Allocations(TorchDispatchMode):
    """Counts operators that allocate, before they run; it is below the modes that the package itself enters."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, failing: int | None) -> None:
        super().__init__()
        self.count = 0
        self._failing = failing

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if allocates(func) and not _launching:
            self.count += 1
            if self.count - 1 == self._failing:
                raise torch.OutOfMemoryError(f"{_OUT_OF_MEMORY}: {func}")
        return func(*args, **kwargs or {})


def allocates(func: Any) -> bool:
    """Return whether an operator returns a tensor that is neither a view nor an argument of it."""
    schema = getattr(func, "_schema", None)
    return schema is not None and any("Tensor" in str(r.type) and r.alias_info is None for r in schema.returns)


_launching: list[None] = []


@contextmanager
def launching() -> Iterator[None]:
    """Simulate the launch of a graph, which allocates nothing, whatever it takes to simulate it."""
    _launching.append(None)
    try:
        yield
    finally:
        _launching.pop()


class Made(TorchDispatchMode):
    """Tells which memory that operators have made meanwhile is still there."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[tuple[str, weakref.ref[Any]]] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **kwargs or {})
        if allocates(func) and not _launching:
            self._storages += [
                (f"{func} {list(y.shape)}", weakref.ref(y.untyped_storage()))
                for y in tree_leaves(outputs)
                if isinstance(y, Tensor)
            ]
        return outputs

    def alive(self) -> list[str]:
        """Return the operators, and the shapes of what they have made."""
        return [made for made, storage in self._storages if storage() is not None]


# Steps

#: A method that launches: its class and name.
Launcher = tuple[type, str]


def steps(network: nn.Module, call: Call, launchers: Sequence[Launcher]) -> int:
    """Call, and return how many hooks of the network's layers, and launches, it has taken."""
    with _stepping(network, launchers, None) as counted:
        call()
    return counted[0]


def fails_at(n: int, network: nn.Module, call: Call, launchers: Sequence[Launcher]) -> bool:
    """Call, with an error at the n-th step, from 0; return whether it came out, as it is or as a cause."""
    try:
        with _stepping(network, launchers, n):
            call()
    except (Failure, RuntimeError) as error:
        assert isinstance(error, Failure) or isinstance(error.__cause__, Failure), error
        return True
    return False


@contextmanager
def _stepping(network: nn.Module, launchers: Sequence[Launcher], failing: int | None) -> Iterator[list[int]]:
    """Step at both hooks of each layer that a user could have, and before each launch; yield the steps so far."""
    counted = [0]

    def step(*_: object) -> None:
        counted[0] += 1
        if counted[0] - 1 == failing:
            raise Failure(f"at step {failing}")

    with pytest.MonkeyPatch.context() as patch, ExitStack() as hooks:
        for owner, name in launchers:
            patch.setattr(owner, name, _after(step, getattr(owner, name)))
        for part in network.backbone.modules():
            if isinstance(part, nn.Linear):  # runners refuse heads and classifiers that get hooks
                continue
            hooks.callback(part.register_forward_pre_hook(step).remove)
            hooks.callback(part.register_forward_hook(step).remove)
        yield counted


def _after(step: Call, launch: Callable[..., object]) -> Callable[..., object]:
    def launch_after(*args: object, **options: object) -> object:
        step()
        return launch(*args, **options)

    return launch_after
