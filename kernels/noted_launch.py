"""NotedLaunch: what one launch of a head kernel was given, so that it can be made again in a fraction of the time.

Before a launch the host checks shapes, chooses a configuration, allocates workspace and lets Triton find the compiled
kernel: on a GPU's host several times the launch itself. Whoever launches the same again and again notes one launch, and
repeats it with other tensors.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

try:
    from . import exit_kernel, fused_head_kernel
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

    def again(self) -> Callable[..., Any]:
        """Return what launches it again, given all arguments by position; if compiled, and ``stream``, its handle."""
        if self.compiled:
            return self.kernel[(*self.grid, 1, 1)[:3]]
        own = {name: value for name, value in self.options.items() if name not in self.names}

        def interpret(*arguments: Any, stream: int) -> None:  # noqa: ARG001  # the interpreter has none
            by_position = len(self.arguments)
            by_name = dict(zip(self.names[by_position:], arguments[by_position:], strict=True))
            self.kernel[self.grid](*arguments[:by_position], **by_name, **own)

        return interpret


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
