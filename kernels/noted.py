"""One launch of a head kernel, noted, to be made again in a fraction of the time: see model/heads/driver_launch.py."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

try:
    from triton.knobs import runtime as triton_knobs
except ImportError:  # no Triton for this platform
    triton_knobs = None


class NotedLaunch(NamedTuple):
    """One launch that was made."""

    kernel: Any  # compiled, or the function that is interpreted
    names: Sequence[str]  # names of the kernel's arguments
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    options: dict[str, Any]  # Triton's own

    @property
    def compiled(self) -> bool:
        """Whether the kernel is compiled: it then takes addresses."""
        return hasattr(self.kernel, "packed_metadata")

    @property
    def packs(self) -> bool:
        """Whether it packs features for the launch behind it, by ``pack_kernel``."""
        return "packed" in self.names

    def given(self) -> dict[str, Any]:
        """Return the arguments by name, in their order."""
        return dict(zip(self.names, self.arguments, strict=True))


#: Launches of this thread that are noted; None: none is.
_noted: ContextVar[list[NotedLaunch] | None] = ContextVar("noted", default=None)


@contextmanager
def noting() -> Iterator[list[NotedLaunch]]:
    """Note the launches of head kernels that this thread makes until the block ends."""
    launches: list[NotedLaunch] = []
    token = _noted.set(launches)
    try:
        yield launches
    finally:
        _noted.reset(token)


def launch(
    function: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], options: dict[str, Any], compiled: Any = None
) -> Any:
    """Launch a kernel, by what it was compiled to if that is known, and note it; returns what it is compiled to.

    That is None where it is interpreted. Options are Triton's own.
    """
    made = (function if compiled is None else compiled)[grid](*arguments, **options)
    compiled = compiled if made is None else made
    launches = _noted.get()
    if launches is not None:
        kernel = function if compiled is None else compiled
        launches.append(NotedLaunch(kernel, function.arg_names, grid, arguments, options))
    return compiled


def are_launches_watched() -> bool:
    """Return whether a profiler has set Triton's hooks of launches, which the driver's launches would not call."""
    return triton_knobs is not None and bool(
        triton_knobs.launch_enter_hook.calls or triton_knobs.launch_exit_hook.calls
    )
