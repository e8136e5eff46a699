"""Energy of calls on a GPU, by the counter of its driver (NVML)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def energy_counter(device: torch.device) -> Callable[[], float] | None:
    """Return what reads the joules that a GPU has taken since its driver was loaded; None where the driver has none."""
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
        gpu = nvml.device_get_handle_by_uuid(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        nvml.device_get_total_energy_consumption(gpu)
    except Exception:  # an older package, no library, a GPU without it
        return None
    return lambda: nvml.device_get_total_energy_consumption(gpu) / 1000.0  # of millijoules


def joules_a_call(
    call: Callable[..., object], inputs: Sequence[Tensor], us: float, read: Callable[[], float], seconds: float
) -> float:
    """Return what a call takes of energy among calls back to back, in joules, all of the device's power included.

    Args:
        call: takes one of the inputs, and joins its streams to the caller's.
        inputs: in turns.
        us: what a call takes on the device.
        read: returns the joules so far; see :func:`energy_counter`.
        seconds: how long calls go on: the driver counts some ten to fifty times in one.
    """
    calls = max(1, round(seconds * 1e6 / us))
    stream = torch.cuda.current_stream(inputs[0].device)  # and not the device: another thread may be capturing
    stream.synchronize()
    before = read()
    for number in range(calls):
        call(inputs[number % len(inputs)])
    stream.synchronize()
    return (read() - before) / calls
