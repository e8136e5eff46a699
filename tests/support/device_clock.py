"""A host and a device with clocks that tests set: time passes where the host works or waits for the device."""

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
