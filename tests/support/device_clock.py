"""A host, a device and its counter of energy, which tests set: time passes where the host works or waits."""

from types import SimpleNamespace

import pytest
import torch


class Clock:
    """Time of a host, and the time at which all that it has launched will be done, microseconds."""

    us = done_us = 0.0

    def perf_counter(self) -> float:
        """Return seconds."""
        return self.us / 1e6

    monotonic = perf_counter

    def launch(self, us: float) -> None:
        """Let the device work for some time, after all that it has to do."""
        self.done_us = max(self.us, self.done_us) + us

    def synchronize(self, _device: object = None) -> None:
        """Let the host wait for the device."""
        self.us = max(self.us, self.done_us)


class Event:
    """An event of CUDA's, which nobody can read before it was waited for."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.us = 0.0

    def record(self) -> None:
        self.us = max(self.clock.us, self.clock.done_us)

    def synchronize(self) -> None:
        self.clock.us = max(self.clock.us, self.us)

    def elapsed_time(self, end: "Event") -> float:
        assert end.us <= self.clock.us, "CUDA refuses an event that nobody has waited for"
        return (end.us - self.us) / 1e3


def pretended_device(patch: pytest.MonkeyPatch, timing_module: str) -> Clock:
    """Let a module that times work on such a device until the test of ``patch`` ends."""
    clock = Clock()
    patch.setattr(f"{timing_module}.time", clock)
    patch.setattr(torch.cuda, "Event", lambda enable_timing: Event(clock))
    patch.setattr(torch.cuda, "synchronize", clock.synchronize)
    patch.setattr(torch.cuda, "current_stream", lambda _device: clock)
    return clock


class EnergyCounter:
    """The driver's counter of a GPU, which a test moves."""

    joules = 0.0
    waits = 0
    """How often the host waited for the current stream."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        """What identified the GPU, each time that it was looked up."""

    def init_v2(self) -> None:
        pass

    def device_get_handle_by_uuid(self, uuid: str) -> str:
        self.asked.append(uuid)
        return uuid

    def device_get_total_energy_consumption(self, _gpu: str) -> int:
        return round(self.joules * 1000)

    def synchronize(self) -> None:
        self.waits += 1


def pretended_energy_counter(patch: pytest.MonkeyPatch) -> EnergyCounter:
    """Let all devices be one GPU, whose driver counts its energy, until the test of ``patch`` ends."""
    counter = EnergyCounter()
    patch.setattr("cuda.bindings.nvml", counter, raising=False)
    patch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid="0123"))
    patch.setattr(torch.cuda, "current_stream", lambda _device: counter)
    return counter
