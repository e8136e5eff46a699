"""Noted launches made again, on a GPU through CUDA's driver.

Before a launch the host checks shapes, chooses a configuration, allocates workspace and lets Triton find the compiled
kernel: on a GPU's host several times the launch itself. Whoever launches the same again and again notes one launch, and
repeats it with other tensors. On a GPU that goes through CUDA's driver, with the arguments packed as it reads them:
Triton's launcher takes every argument as a Python object and calls the hooks of profilers, with the 250 arguments of
eight heads 30 us of a host that has done something else before, where this takes a few.
"""

import struct
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.cuda.runtime import driver
from ...kernels.noted import NotedLaunch


def repeated(noted: NotedLaunch, varying: Sequence[Tensor], stream: int) -> Callable[[Sequence[Any]], None]:
    """Return what makes a launch again on a stream, given by its handle (the interpreter has none).

    It takes other tensors in place of the ``varying`` ones, in their order; of a compiled kernel their addresses,
    about which Triton does not ask the driver. All others are kept, those themselves are let go of.
    """
    stand_ins = [object() for _ in varying]
    arguments = _replaced(noted.arguments, _by_identity(varying, stand_ins))
    again, options = noted.kernel[noted.grid], {"stream": stream} if noted.compiled else noted.options
    by_driver = _driver_launch(noted, varying) if noted.compiled else None
    handle = None if by_driver is None else driver.CUstream(stream)

    def launch(values: Sequence[Any]) -> None:
        # A thread's first launch, too, is Triton's, which gives the thread CUDA's context.
        if by_driver is None or not by_driver(values, handle):
            again(*_replaced(arguments, _by_identity(stand_ins, values)), **options)

    return launch


def _by_identity(things: Sequence[object], others: Sequence[Any]) -> dict[int, Any]:
    return dict(zip(map(id, things), others, strict=True))


def _replaced(value: Any, others: Mapping[int, Any]) -> Any:
    """Return nested tuples with others in place of some things, by their ``id``."""
    if isinstance(value, tuple):
        return tuple(_replaced(part, others) for part in value)
    return others.get(id(value), value)


class DriverLaunch:
    """A launch through CUDA's driver of which some pointers are others each time."""

    def __init__(self, kernel: Any, grid: Sequence[int], packed: bytes, places: Sequence[int]):
        """Take a kernel that Triton has loaded, its parameters in 8 bytes each, and which of them vary."""
        warps, _, shared = kernel.packed_metadata
        self._function = driver.CUfunction(kernel.function)
        self._sizes = (*grid, 32 * warps, 1, 1, shared)
        self._packed, self._places = packed, places
        # Parameters and pointers to them; used by one call at a time, whatever threads and handlers of signals do.
        self._free: list[tuple[array[int], array[int]]] = []

    def __call__(self, addresses: Sequence[int], stream: Any) -> bool:
        """Launch with these addresses in the places that vary, on a stream, a ``driver.CUstream``.

        Returns False if this thread has no CUDA context yet; nothing is launched then.

        Raises:
            RuntimeError: the driver refuses.
        """
        try:
            words, pointers = self._free.pop()
        except IndexError:
            words = array("Q", self._packed)
            first = words.buffer_info()[0]
            pointers = array("Q", range(first, first + len(self._packed), 8))
        for place, address in zip(self._places, addresses, strict=True):
            words[place] = address
        (error,) = driver.cuLaunchKernel(self._function, *self._sizes, stream, pointers.buffer_info()[0], 0)
        self._free.append((words, pointers))
        if error == driver.CUresult.CUDA_SUCCESS:
            return True
        if error == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            return False
        kind = torch.OutOfMemoryError if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY else RuntimeError
        raise kind(f"{driver.cuGetErrorString(error)[1].decode()} ({error.name})")


#: Formats of ``struct`` by Triton's name of a number's type.
_FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}


def _driver_launch(noted: NotedLaunch, varying: Sequence[Tensor]) -> DriverLaunch | None:
    """Return what repeats a launch of a compiled kernel; None if that cannot be had.

    Kernels must have parameters of the driver's sizes, and no clusters, cooperation of programs or scratch memory.
    """
    kernel, given = noted.kernel, noted.given()
    if driver is None or len(kernel.packed_metadata) != 3 or kernel.metadata.num_ctas != 1:
        return None
    refused = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    if any(getattr(kernel.metadata, name, 0) for name in refused):
        return None
    parameters = [one for name, kind in kernel.src.signature.items() for one in _parameters(kind, given[name])]
    sizes = _sizes(kernel.function)
    expected = [struct.calcsize(form) for form, _ in parameters]
    scratch = sizes[len(expected) :]  # pointers that are null
    if sizes[: len(expected)] != expected or any(size != 8 for size in scratch):
        return None
    values = [value.data_ptr() if isinstance(value, Tensor) else value for _, value in parameters]
    packed = [struct.pack(form, value).ljust(8, b"\0") for (form, _), value in zip(parameters, values, strict=True)]
    found = [id(value) for _, value in parameters]
    places = [found.index(id(one)) for one in varying]
    return DriverLaunch(kernel, noted.grid, b"".join(packed) + bytes(8 * len(scratch)), places)


def _parameters(kind: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield format and value of the parameters that an argument becomes; constants are part of the code.

    A number of another type gets the format of one byte, which no parameter has: its launch is left to Triton.
    """
    if isinstance(kind, tuple):
        for inner, part in zip(kind, value, strict=True):
            yield from _parameters(inner, part)
    elif kind != "constexpr":
        yield "Q" if kind.startswith("*") else _FORMATS.get(kind, "x"), value


def _sizes(function: int) -> list[int]:
    """Return the bytes of each parameter of a loaded kernel, as the driver knows them."""
    sizes: list[int] = []
    while True:
        error, _offset, size = driver.cuFuncGetParamInfo(driver.CUfunction(function), len(sizes))
        if error != driver.CUresult.CUDA_SUCCESS:
            return sizes
        sizes.append(int(size))
