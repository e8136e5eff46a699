"""One launch of a head kernel, noted, to be made again in a fraction of the time.

Before a launch the host checks shapes, chooses a configuration, allocates workspace and lets Triton find the compiled
kernel: on a GPU's host several times the launch itself. Whoever launches the same again and again notes one launch, and
repeats it with other tensors. On a GPU that goes through CUDA's driver, with the arguments packed as it reads them:
Triton's launcher takes every argument as a Python object and calls the hooks of profilers, with the 250 arguments of
eight heads 30 us of a host that has done something else before, where this takes a few.
"""

import struct
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    from cuda.bindings import driver
except ImportError:  # where torch has no CUDA
    driver = None
try:
    from triton.knobs import runtime as triton_knobs
except ImportError:  # no Triton for this platform
    triton_knobs = None

#: Where an argument stands: its name, and in nested tuples the indices that lead to it.
Path = tuple[str | int, ...]


class NotedLaunch(NamedTuple):
    """One launch that was made."""

    kernel: Any
    """Compiled, or the function that is interpreted."""
    names: Sequence[str]
    """Names of the kernel's arguments."""
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    """Triton's own."""

    @property
    def compiled(self) -> bool:
        """Whether the kernel is compiled: it then takes addresses."""
        return hasattr(self.kernel, "packed_metadata")

    def given(self) -> dict[str, Any]:
        """Return the arguments by name, in their order."""
        return dict(zip(self.names, self.arguments, strict=True))

    def repeat(self, varying: Sequence[Path], stream: int) -> Callable[[Sequence[Any]], None]:
        """Return what launches it again on a stream, given by its handle (the interpreter has none).

        It takes the tensors for the places of ``varying``, in that order; of a compiled kernel their addresses, about
        which Triton does not ask the driver. The tensors of the noted launch in these places are let go of.
        """
        given = self.given()
        places = frozenset(varying)
        fixed = {name: _fixed(value, (name,), places, addresses=self.compiled) for name, value in given.items()}
        if not self.compiled:
            interpreted, options = self.kernel[self.grid], self.options
            return lambda tensors: interpreted(*_filled(fixed, varying, tensors).values(), **options)
        by_triton = self.kernel[(*self.grid, 1, 1)[:3]]
        by_driver = _driver_launch(self.kernel, self.grid, given, varying)
        handle = None if by_driver is None else driver.CUstream(stream)

        def launch(addresses: Sequence[int]) -> None:
            # A thread's first launch, too, is Triton's, which gives the thread CUDA's context.
            if by_driver is None or not by_driver(addresses, handle):
                by_triton(*_filled(fixed, varying, addresses).values(), stream=stream)

        return launch


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


def launch(
    function: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any], compiled: Any = None
) -> Any:
    """Launch a kernel, by what it was compiled to if that is known, and note it; returns what it is compiled to.

    That is None where it is interpreted. Options are Triton's own.
    """
    made = (function if compiled is None else compiled)[grid](*arguments, **options)
    compiled = compiled if made is None else made
    if _notes.launches is not None:
        kernel = function if compiled is None else compiled
        _notes.launches.append(NotedLaunch(kernel, function.arg_names, grid, arguments, options))
    return compiled


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


#: Formats of ``struct`` by Triton's name of a type; pointers begin with "*".
_FORMATS = {
    "i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip


def are_launches_watched() -> bool:
    """Return whether a profiler has set Triton's hooks of launches, which the driver's launches would not call."""
    return triton_knobs is not None and bool(
        triton_knobs.launch_enter_hook.calls or triton_knobs.launch_exit_hook.calls
    )


class DriverLaunch:
    """A launch through CUDA's driver of which some pointers are others each time."""

    def __init__(self, kernel: Any, grid: Sequence[int], parameters: "Sequence[_Parameter]", varying: Sequence[Path]):
        """Take a kernel that Triton has loaded; see ``_driver_launch``, which checks that it can be had."""
        warps, _, shared = kernel.packed_metadata
        self._function = driver.CUfunction(kernel.function)
        self._sizes = (*grid, 1, 1)[:3] + (32 * warps, 1, 1, shared)
        self._packed = b"".join(parameter.packed() for parameter in parameters)
        paths = [parameter.path for parameter in parameters]
        self._places = [paths.index(path) for path in varying]
        self._free: list[_Block] = []  # each is used by one call at a time, whatever threads and handlers of signals do

    def __call__(self, addresses: Sequence[int], stream: Any) -> bool:
        """Launch with these addresses in the places that vary, on a stream, a ``driver.CUstream``.

        Returns False if this thread has no CUDA context yet; nothing is launched then.

        Raises:
            RuntimeError: the driver refuses.
        """
        try:
            block = self._free.pop()
        except IndexError:
            block = _Block.holding(self._packed)
        words = block.words
        for place, address in zip(self._places, addresses, strict=True):
            words[place] = address
        (error,) = driver.cuLaunchKernel(self._function, *self._sizes, stream, block.pointers_at, 0)
        self._free.append(block)
        if error == driver.CUresult.CUDA_SUCCESS:
            return True
        if error == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            return False
        kind = torch.OutOfMemoryError if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY else RuntimeError
        raise kind(f"{driver.cuGetErrorString(error)[1].decode()} ({error.name})")


class _Block(NamedTuple):
    """Memory for the arguments of one launch, 8 bytes each, and pointers to them."""

    words: "array[int]"
    pointers: "array[int]"
    pointers_at: int

    @classmethod
    def holding(cls, packed: bytes) -> "_Block":
        words = array("Q", packed)
        first, count = words.buffer_info()
        pointers = array("Q", range(first, first + 8 * count, 8))
        return cls(words, pointers, pointers.buffer_info()[0])


class _Parameter(NamedTuple):
    """One parameter of a kernel as it is compiled."""

    path: Path
    format: str
    value: Any

    def packed(self) -> bytes:
        value = self.value.data_ptr() if isinstance(self.value, Tensor) else 0 if self.value is None else self.value
        return struct.pack(self.format, value).ljust(8, b"\0")


def _driver_launch(
    kernel: Any, grid: Sequence[int], given: Mapping[str, Any], varying: Sequence[Path]
) -> DriverLaunch | None:
    """Return what repeats a launch of a compiled kernel, given its arguments by name; None if that cannot be had.

    Kernels must have parameters of the driver's sizes, and no clusters, cooperation of programs or scratch memory.
    """
    metadata = kernel.metadata
    if driver is None or len(kernel.packed_metadata) != 3 or metadata.num_ctas != 1:
        return None
    if any(
        getattr(metadata, name, 0)
        for name in ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    ):
        return None
    parameters = [
        parameter for name, kind in kernel.src.signature.items() for parameter in _flat((name,), kind, given[name])
    ]
    sizes = _sizes(kernel.function)
    expected = [struct.calcsize(parameter.format) for parameter in parameters]
    scratch = sizes[len(expected) :]  # pointers that are null
    if sizes[: len(expected)] != expected or any(size != 8 for size in scratch):
        return None
    parameters += [_Parameter(("scratch", index), "Q", None) for index in range(len(scratch))]
    if not {*varying} <= {parameter.path for parameter in parameters if parameter.format == "Q"}:
        return None
    return DriverLaunch(kernel, grid, parameters, varying)


def _flat(path: Path, kind: Any, value: Any) -> Iterator[_Parameter]:
    """Yield the parameters that an argument becomes; constants are part of the code."""
    if isinstance(kind, tuple):
        for index, (inner, part) in enumerate(zip(kind, value, strict=True)):
            yield from _flat((*path, index), inner, part)
    elif kind != "constexpr":  # of a type that is not known here one byte, which no parameter has: it is left to Triton
        yield _Parameter(path, "Q" if kind.startswith("*") else _FORMATS.get(kind, "x"), value)


def _sizes(function: int) -> list[int]:
    """Return the bytes of each parameter of a loaded kernel, as the driver knows them."""
    sizes: list[int] = []
    while True:
        error, _offset, size = driver.cuFuncGetParamInfo(driver.CUfunction(function), len(sizes))
        if error != driver.CUresult.CUDA_SUCCESS:
            return sizes
        sizes.append(int(size))
