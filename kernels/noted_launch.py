"""NotedLaunch: what one launch of a head kernel was given, so that it can be made again in a fraction of the time.

Before a launch the host checks shapes, chooses a configuration, allocates workspace and lets Triton find the compiled
kernel: on a GPU's host several times the launch itself. Whoever launches the same again and again notes one launch, and
repeats it with other tensors.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from .cuda.driver_launch import Path, driver, driver_launch

try:
    from .jit import exits as exit_kernel
    from .jit import fused_head as fused_head_kernel
except ImportError:  # no Triton for this platform
    exit_kernel = fused_head_kernel = None  # type: ignore[assignment]


class NotedLaunch(NamedTuple):
    """One launch that was made."""

    kernel: Any
    """Compiled, or the function that is interpreted."""
    names: Sequence[str]
    """Names of the kernel's arguments."""
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    """Arguments given by name, and Triton's own."""

    @property
    def compiled(self) -> bool:
        """Whether the kernel is compiled: it then takes addresses, and all arguments by position."""
        return hasattr(self.kernel, "packed_metadata")

    def given(self) -> dict[str, Any]:
        """Return the arguments by name, in their order."""
        by_name = {**dict(zip(self.names, self.arguments, strict=False)), **self.options}
        return {name: by_name[name] for name in self.names}

    def repeat(self, varying: Sequence[Path], stream: int) -> Callable[[Sequence[Any]], None]:
        """Return what launches it again on a stream, given by its handle (the interpreter has none).

        It takes the tensors for the places of ``varying``, in that order; of a compiled kernel their addresses, about
        which Triton does not ask the driver. The tensors of the noted launch in these places are let go of.
        """
        given = self.given()
        own = {name: value for name, value in self.options.items() if name not in self.names}
        places = frozenset(varying)
        fixed = {name: _fixed(value, (name,), places, addresses=self.compiled) for name, value in given.items()}
        if not self.compiled:
            kernel, grid, by_position = self.kernel, self.grid, len(self.arguments)

            def interpret(tensors: Sequence[Tensor]) -> None:
                filled = _filled(fixed, varying, tensors)
                names = [*filled]
                by_name = {name: filled[name] for name in names[by_position:]}
                kernel[grid](*[filled[name] for name in names[:by_position]], **by_name, **own)

            return interpret
        by_triton = self.kernel[(*self.grid, 1, 1)[:3]]
        by_driver = driver_launch(self.kernel, self.grid, given, varying)
        handle = None if by_driver is None else driver.CUstream(stream)

        def launch(addresses: Sequence[int]) -> None:
            # A thread's first launch, too, is Triton's, which gives the thread CUDA's context.
            if by_driver is None or not by_driver(addresses, handle):
                by_triton(*_filled(fixed, varying, addresses).values(), stream=stream)

        return launch


def _fixed(value: Any, path: Path, varying: frozenset[Path], *, addresses: bool) -> Any:
    """Return an argument with None in the places that vary, and addresses for tensors if those are wanted."""
    if path in varying:
        return None
    if isinstance(value, tuple):
        return tuple(_fixed(part, (*path, index), varying, addresses=addresses) for index, part in enumerate(value))
    return value.data_ptr() if addresses and isinstance(value, Tensor) else value


def _filled(fixed: Mapping[str, Any], varying: Sequence[Path], values: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments with values in the places that vary."""
    filled = dict(fixed)
    for (name, *indices), value in zip(varying, values, strict=True):
        filled[str(name)] = _replaced(filled[str(name)], indices, value)
    return filled


def _replaced(whole: Any, indices: Sequence[Any], value: Any) -> Any:
    """Return nested tuples with another value at the place that the indices lead to."""
    if not indices:
        return value
    index, *inner = indices
    return (*whole[:index], _replaced(whole[index], inner, value), *whole[index + 1 :])


class _Notes(threading.local):
    launches: list[NotedLaunch] | None = None


_notes = _Notes()


@contextmanager
def noting() -> Iterator[list[NotedLaunch]]:
    """Note the launches of head kernels that this thread makes until the block ends."""
    before, _notes.launches = _notes.launches, []
    try:
        yield _notes.launches
    finally:
        _notes.launches = before


class _NotingKernel:
    """A kernel whose launches are noted; in everything else the kernel itself."""

    def __init__(self, kernel: Any, names: Sequence[str]) -> None:
        self._kernel = kernel
        self._names = names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
        compiled = self._kernel[grid](*arguments, **options)  # None if it is interpreted, or compiled already
        if _notes.launches is not None:
            kernel = self._kernel if compiled is None else compiled
            _notes.launches.append(NotedLaunch(kernel, self._names, grid, arguments, options))
        return None if compiled is None else _NotingKernel(compiled, self._names)


# Here and not as decorators of the kernels: a change of their files' code would void the tuned tables.
if fused_head_kernel is not None:
    for module, name in ((fused_head_kernel, "fused_head_kernel"), (exit_kernel, "exit_kernel")):
        kernel = getattr(module, name)
        setattr(module, name, _NotingKernel(kernel, kernel.arg_names))
