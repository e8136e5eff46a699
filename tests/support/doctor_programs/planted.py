"""A program for every kind of finding, with that fault and, as far as faults come alone, no other."""

import itertools

import torch
from torch import Tensor, nn

from .layers import Beside, OnCallersStream, Wide, narrow_input, pooled_head, wide_input
from .program import Made, Program, device, planted


class Race(Beside):
    def run(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x)
        with torch.cuda.stream(self.side):
            beside = self.branch(y)  # which the trunk may still be writing
        z = self.second(y)
        self.trunk.wait_stream(self.side)
        beside.record_stream(self.trunk)
        return z, beside


class FreedInUse(Beside):
    def run(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x)
        self.side.wait_stream(self.trunk)
        with torch.cuda.stream(self.side):
            beside = self.branch(y)
        y = self.second(y)  # frees what the branch reads
        y = self.third(y)  # takes its memory
        self.trunk.wait_stream(self.side)
        beside.record_stream(self.trunk)
        return y, beside


class UnrecordedEvent(Beside):
    def run(self, x: Tensor) -> tuple[Tensor, ...]:
        ready = torch.cuda.Event()
        self.side.wait_event(ready)  # of an event that was never recorded: no wait at all
        y = self.first(x)
        with torch.cuda.stream(self.side):
            beside = self.branch(y)
        ready.record(self.trunk)
        z = self.second(y)
        self.trunk.wait_stream(self.side)
        beside.record_stream(self.trunk)
        return z, beside


def mixed_devices() -> Made:
    """The side stream is one of the other GPU, so that the branch runs on the trunk's."""
    program = Beside()
    program.side = torch.cuda.Stream(device=1)
    return program, narrow_input()


class DefaultStream(OnCallersStream):
    def run(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x)
        self.side.wait_stream(self.trunk)
        beside = self.branch(y)  # outside of `with torch.cuda.stream(self.side)`
        z = self.second(y)
        self.trunk.wait_stream(self.side)
        return z, beside


class StreamClass(Beside):
    def run(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x)
        self.side.wait_stream(self.trunk)
        with torch.cuda.Stream(self.side):  # a class: makes another stream, which nothing waits for
            beside = self.branch(y)
        z = self.second(y)
        self.trunk.wait_stream(self.side)
        beside.record_stream(self.trunk)
        return z, beside


def priority() -> Made:
    """The trunk is on the default stream, of priority 0, and the side stream goes before it."""
    program = OnCallersStream()
    program.side = torch.cuda.Stream(priority=-1)
    return program, narrow_input()


def launch_bound() -> Made:
    layers = [layer for _ in range(12) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers).to(device()).eval(), torch.randn(1, 16, 16, 16, device=device())


class HostWait(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Wide(), Wide()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.mean().item() > 1e9:  # the host waits for the first layer
            return y
        return self.second(y)


class Allocation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Wide(), Wide(), Wide())

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda.empty_cache()  # "to save memory": all of it is taken from the driver again
        return self.layers(x)


class PageableCopy(nn.Module):
    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.first, self.second = Wide(), Wide()
        self.mask = torch.ones(shape[0], 1, *shape[2:])  # on the host, and not pinned

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.mask.to(x.device, non_blocking=True))


def pageable_copy() -> Made:
    x = wide_input()
    return PageableCopy(x.shape), x


class FullDevice(Beside):
    """Streams used right, beside one long kernel that leaves no room."""

    def __init__(self) -> None:
        super().__init__()
        elements = 1 << 29 if torch.cuda.is_available() else 8
        self.large = torch.ones(elements, device=device())  # 2 GB: its square takes some 1 ms

    def run(self, x: Tensor) -> tuple[Tensor, ...]:
        torch.cuda._sleep(20_000_000)  # some 10 ms in one block: all else is launched by then, however slow the host
        y = self.first(x)
        self.side.wait_stream(self.trunk)
        z = self.large.square()
        with torch.cuda.stream(self.side):
            beside = self.branch(y)
        self.trunk.wait_stream(self.side)
        beside.record_stream(self.trunk)
        return z, beside


class GateWaits(Beside):
    def __init__(self) -> None:
        super().__init__(Wide)
        self.head = pooled_head()

    def run(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x)
        self.side.wait_stream(self.trunk)
        with torch.cuda.stream(self.side):
            still_open = (self.head(y).amax(dim=1) < 0.9).view(-1, 1, 1, 1)
        self.trunk.wait_stream(self.side)  # the next layer reads the gate: nothing is beside the head
        z = self.second(y * still_open)
        still_open.record_stream(self.trunk)
        return (z,)


class HeadsInLine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Wide(), Wide()])
        self.heads = nn.ModuleList([pooled_head(), pooled_head()])

    def forward(self, x: Tensor) -> list[Tensor]:
        answers = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            answers.append(head(x))
        return answers


class Recapture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Wide(), Wide(), Wide())

    def forward(self, x: Tensor) -> Tensor:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            y = self.layers(x)
        self.graph.replay()
        return y


def recapture() -> Made:
    program, x = Recapture(), wide_input()
    with torch.no_grad():
        program.layers(x)  # cuDNN is there before anything is captured
    torch.cuda.synchronize()
    return program, x


class CudnnBenchmark(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Wide(), Wide())
        self.requests = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        samples = len(x) - next(self.requests) % (len(x) - 1)  # of another size each time
        with torch.backends.cudnn.flags(enabled=True, benchmark=True):
            return self.layers(x[:samples])


#: By name; mostly the kind of finding.
PROGRAMS: dict[str, Program] = {
    "race": planted(lambda: (Race(), narrow_input()), "race"),
    "freed_in_use": planted(lambda: (FreedInUse(), narrow_input()), "freed-in-use", may_find=("race",)),
    "unrecorded_event": planted(lambda: (UnrecordedEvent(), narrow_input()), "unrecorded-event", may_find=("race",)),
    "mixed_devices": planted(mixed_devices, "mixed-devices", may_find=("default-stream",), devices=2),
    "default_stream": planted(lambda: (DefaultStream(), narrow_input()), "default-stream"),
    "stream_class": planted(
        lambda: (StreamClass(), narrow_input()),
        "stream-class",
        may_find=("race", "freed-in-use", "default-stream", "allocation"),
    ),
    "priority": planted(priority, "priority"),
    "launch_bound": planted(launch_bound, "launch-bound", needs_cuda=False),
    "host_wait": planted(lambda: (HostWait(), wide_input()), "host-wait", needs_cuda=False),
    # the device idles while the host waits for the driver
    "allocation": planted(
        lambda: (Allocation(), wide_input()), "allocation", may_find=("launch-bound",), needs_cuda=False
    ),
    "pageable_copy": planted(pageable_copy, "pageable-copy", needs_cuda=False),
    "full_device": planted(lambda: (FullDevice(), narrow_input()), "full-device"),
    "gate_waits": planted(lambda: (GateWaits(), wide_input()), "gate-waits", may_find=("fusible-heads", "full-device")),
    "fusible_heads": planted(lambda: (HeadsInLine(), wide_input()), "fusible-heads", needs_cuda=False),
    # torch.cuda.graph waits for the device, and empties the allocator's cache
    "recapture": planted(recapture, "recapture", may_find=("host-wait", "allocation", "launch-bound")),
    # each algorithm is waited for, and takes a workspace
    "cudnn_benchmark": planted(
        lambda: (CudnnBenchmark(), wide_input()),
        "cudnn-benchmark",
        may_find=("host-wait", "allocation", "launch-bound"),
        needs_cuda=False,
    ),
}
