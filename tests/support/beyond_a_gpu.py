"""Networks that no GPU has room for, in processes that may have so much of each; arguments are in ``sys.argv``.

Answers, and what PyTorch and the driver count, go into a file a rank.
"""

import gc
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead, Runner, parallelize, pipelined
from torch import Tensor, nn

MIB = 2**20
#: What a process may have of each GPU, beside what it has when it begins.
CAP = 768 * MIB
CLASSES = 5


class _Layer(nn.Module):
    """Layers around which the input goes."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layers(x))


def wide(blocks: int = 77, width: int = 2048) -> tuple[EarlyExitNetwork, Tensor]:
    """Linear layers of 16 MiB each."""
    torch.manual_seed(0)
    layers = [_Layer(nn.Linear(width, width)) for _ in range(blocks)]
    heads = {str(index): FusedAuxHead(width, CLASSES, pool="none") for index in range(0, blocks - 1, 2)}
    x = torch.randn(8, width)
    return _decided(EarlyExitNetwork(nn.Sequential(*layers, nn.Linear(width, CLASSES)), heads), x), x


def residual(blocks: int = 17, width: int = 1024) -> tuple[EarlyExitNetwork, Tensor]:
    """A ResNet's basic blocks, of 72 MiB each."""
    torch.manual_seed(0)

    def block() -> nn.Module:
        convolutions = [nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)]
        norms = [nn.BatchNorm2d(width) for _ in range(2)]
        return _Layer(convolutions[0], norms[0], nn.ReLU(inplace=True), convolutions[1], norms[1])

    stem = [nn.Conv2d(3, width, 4, stride=4), nn.ReLU()]
    last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)]
    backbone = nn.Sequential(*stem, *[block() for _ in range(blocks)], *last)
    x = torch.randn(8, 3, 16, 16) + 2 * torch.randn(8, 3, 1, 1)
    heads = {str(index): FusedAuxHead(None, CLASSES) for index in range(2, blocks + 1)}
    return _decided(EarlyExitNetwork(backbone, heads, example_input=x), x), x


def _decided(network: EarlyExitNetwork, x: Tensor) -> EarlyExitNetwork:
    """Let some samples out at each of three exits, by thresholds that rounding does not reach."""
    network.eval().set_rules(1.0)
    here = torch.ones(len(x), dtype=torch.bool)
    with torch.no_grad():
        outputs = network.logits(x)
    for index in (0, len(network.taps) // 2, len(network.taps) - 1):
        sure = outputs[index].softmax(1).amax(1)
        ranked = sure[here].sort().values
        least = len(ranked) // 2  # of two that lie next to each other, the widest gap in the upper half
        place = least + int(ranked[least:].diff().argmax())
        threshold = (ranked[place] + ranked[place + 1]).item() / 2
        network.exit_heads[index].rule.threshold = threshold
        here &= sure <= threshold
    return network


class Counts:
    """Most bytes that the driver counts for this process, by GPU, beyond what is outside of PyTorch's memory at first.

    That is contexts, libraries, and what NCCL keeps for its ranks.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._count = pynvml.nvmlDeviceGetComputeRunningProcesses
        names = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in devices]
        self._handles = [pynvml.nvmlDeviceGetHandleByUUID(name) for name in names]
        reserved = [torch.cuda.memory_reserved(index) for index in devices]
        self._outside = [now - own for now, own in zip(self._now(), reserved, strict=True)]
        self._most, self._ended = [0] * len(devices), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _now(self) -> list[int]:
        """Count; zero where the driver tells nothing of processes."""
        return [
            next((one.usedGpuMemory or 0 for one in self._count(handle) if one.pid == os.getpid()), 0)
            for handle in self._handles
        ]

    def _look(self) -> None:
        while not self._ended.wait(0.01):
            self._most = [max(pair) for pair in zip(self._most, self._now(), strict=True)]

    def __enter__(self) -> "Counts":
        """Begin to look."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def most(self) -> list[int]:
        """Return the most that there were while it looked."""
        return [most - outside for most, outside in zip(self._most, self._outside, strict=True)]


@contextmanager
def _made(network: EarlyExitNetwork, x: Tensor, way: str, ends: str, middle: str) -> Iterator[Runner]:
    where = ends if ends == "auto" else [middle]
    if way == "pipelined":
        made: Runner = pipelined(network, x, split_size=4, stages=where, device="cuda")
    else:
        made = parallelize(network, x, devices=["cuda:0", "cuda:1"], exits=way, balance=where)
    with made as runner:
        yield runner


def main() -> None:
    """Arguments: network, "overlapped", "polled" or "pipelined", "auto" or "middle"."""
    kind, way, ends = sys.argv[1:4]
    rank = int(os.environ.get("RANK", "0"))
    torch.backends.cudnn.allow_tf32 = False
    if way == "pipelined":
        torch.cuda.set_device(rank)
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    devices = [rank] if way == "pipelined" else [0, 1]
    make = globals()[kind]
    small, x = make(4, 64)
    with _made(small, x, way, ends, small.taps[1]) as run:  # contexts, libraries and their workspaces
        run(x if rank == 0 else None)  # type: ignore[arg-type]
        counts = Counts(devices)
    del small, run
    network, x = make()
    with torch.no_grad():
        wanted = network(x)
    addresses = [id(each) for each in network.parameters()]
    gc.collect()
    torch.cuda.empty_cache()
    before = [torch.cuda.memory_reserved(index) for index in devices]
    for index, reserved in zip(devices, before, strict=True):
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction((reserved + CAP) / total, index)
        torch.cuda.reset_peak_memory_stats(index)
    middle = network.taps[len(network.taps) // 2]
    with counts, _made(network, x, way, ends, middle) as run:
        found = run(x if rank == 0 else None)  # type: ignore[arg-type]
        answer = None if found is None else [part.cpu() for part in found]
    assert [id(each) for each in network.parameters()] == addresses
    held = sum(each.nbytes for each in network.backbone.parameters())
    allocated = [torch.cuda.max_memory_allocated(index) for index in devices]
    by_pytorch, by_driver = (
        [most - reserved for most, reserved in zip(each, before, strict=True)] for each in (allocated, counts.most())
    )
    torch.save((answer, [part.clone() for part in wanted], held, by_pytorch, by_driver), f"{rank}.pt")


if __name__ == "__main__":
    main()
