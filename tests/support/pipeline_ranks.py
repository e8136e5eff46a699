"""Ranks of the tests of pipelines: networks, requests, and what each process runs; arguments are in ``sys.argv``."""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from auxhead.model import (
    EarlyExitNetwork,
    ExitMonitor,
    ExitResult,
    ExitRule,
    Extract,
    FusedAuxHead,
    load_checkpoint,
    pipelined,
)
from auxhead.model.parallel.pipeline import exchange
from auxhead.model.parallel.pipeline.stage import Stage
from torch import Tensor, nn

CLASSES = 5
#: Micro-batches that go through a schedule at once, where it is said that they are few.
FEW = 2
#: Sizes of batches: the smallest, around multiples of micro-batches, and the largest; more than there are rules.
SOME = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 32, 33, 64, 65, 130)


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2))


def plain() -> EarlyExitNetwork:
    """Four segments, with layers that work in place."""
    torch.manual_seed(0)
    layers = [_block(3, 8), nn.Hardtanh(-0.1, 0.1), _block(8, 8), _block(8, 16)]
    backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))
    heads = {tap: FusedAuxHead(None, CLASSES) for tap in ("0", "2", "3")}
    return _ready(EarlyExitNetwork(backbone, heads, example_input=torch.randn(2, 3, 16, 16)))


def normed() -> EarlyExitNetwork:
    """Two segments, the first with a batch norm, which a trunk folds into a convolution."""
    torch.manual_seed(2)
    first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    backbone = nn.Sequential(first, _block(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))
    return _ready(
        EarlyExitNetwork(backbone, {"0": FusedAuxHead(None, CLASSES)}, example_input=torch.randn(2, 3, 16, 16))
    )


class _Tokens(nn.Module):
    """Tokens that lie before samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix, self.rest = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # [N, 7, 6]
        tokens, samples = x.shape[1], len(x)
        y = self.mix(self.first(x).transpose(0, 1))
        y = self.rest((torch.tanh(y) + y).flip(2)).view(tokens, samples, -1)
        return self.out((y * torch.tanh(y)).mean(0))


def tokens() -> EarlyExitNetwork:
    """A head that is a module, and tokens that lie [T, N, D]."""
    torch.manual_seed(1)
    heads: dict[str, nn.Module] = {
        "mix": FusedAuxHead(None, CLASSES),
        "rest": nn.Sequential(nn.Flatten(), nn.Linear(56, 12), nn.Tanh(), nn.Linear(12, CLASSES)),
    }
    extract = {tap: Extract(layout="TND") for tap in heads}
    network = EarlyExitNetwork(_Tokens(), heads, extract=extract)
    network.check_taps(torch.randn(2, 7, 6))
    return _ready(network)


class _Skipping(nn.Module):
    """The batch goes past the tap."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(x) + x)


def skipping() -> EarlyExitNetwork:
    """One that cannot be cut at its tap."""
    return EarlyExitNetwork(_Skipping(), {"mix": FusedAuxHead(6, CLASSES, pool="none")}).eval()


def _ready(network: EarlyExitNetwork) -> EarlyExitNetwork:
    """Spread confidences, so that thresholds let out shares of the samples."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(2.0)
    return network.eval()


def batch_of(name: str, samples: int) -> Tensor:
    torch.manual_seed(samples)
    return torch.randn(samples, *((3, 16, 16) if name == "plain" else (7, 6)))


def rules_of(network: EarlyExitNetwork) -> list[list[ExitRule]]:
    """Rules for all heads: nobody leaves, everybody, some at each exit, by all criteria, with exits that are off."""
    heads = len(network.taps)
    return [
        [ExitRule(1.0)] * heads,
        [ExitRule(0.0)] * heads,
        [ExitRule(threshold) for threshold in (0.4, 0.35, 0.3)][:heads],
        [ExitRule(0.3, enabled=False), *[ExitRule(0.45, temperature=0.5)] * (heads - 1)],
        [
            ExitRule(threshold, criterion=name)
            for threshold, name in ((0.1, "entropy"), (0.2, "margin"), (0.9, "energy"))
        ][:heads],
        [ExitRule(criterion="patience", threshold=1.0)] * heads,
        [ExitRule(0.5), *[ExitRule(criterion="patience", threshold=1.0)] * (heads - 1)],
    ]


def requests(
    name: str, network: EarlyExitNetwork, sizes: Iterable[int], *, numbers_alone: bool = False
) -> Iterator[Tensor]:
    """Batches of sizes, with the network's rules changed before each; a graph has one criterion."""
    rules = rules_of(network)[: 4 if numbers_alone else None]
    for place, samples in enumerate(sizes):
        network.set_rules(dict(zip(network.taps, rules[place % len(rules)], strict=True)))
        yield batch_of(name, samples)


def assert_same(found: Iterable[Tensor], wanted: ExitResult, **tolerance: float) -> None:
    label, confidence, probs, exit_index = (part.cpu() for part in found)
    assert torch.equal(label, wanted.label.cpu()) and torch.equal(exit_index, wanted.exit_index.cpu())
    torch.testing.assert_close(confidence, wanted.confidence.cpu(), equal_nan=True, **tolerance)
    torch.testing.assert_close(probs, wanted.probs.cpu(), **tolerance)


def answer() -> None:
    """Arguments: network, split_size, how, taps or "auto", sizes of batches, device.

    How: "whole", or "in parts" if few micro-batches go through a schedule at once.
    """
    name, size, how, stages, sizes, device = sys.argv[1:7]
    torch.backends.cudnn.allow_tf32 = False
    if how == "in parts":
        exchange._MOST_MICRO_BATCHES = FEW
    network = globals()[name]()
    exits = len(network.taps) + 1
    network.monitor = ExitMonitor([1 / exits] * exits, 100)
    computed = _count_computed()
    found = []
    example = batch_of(name, 16)
    ends = stages if stages == "auto" else stages.split(",")
    with pipelined(network, example, split_size=int(size), stages=ends, device=device) as run:
        said = run.describe()
        for x in requests(name, network, map(int, sizes.split(",")), numbers_alone=device == "cuda"):
            computed.append(0)
            answered = run(x if run.is_first else None)
            if answered is not None:
                found.append(tuple(answered))
    torch.save((found, computed, said, network.monitor.counts()), f"{os.environ['RANK']}.pt")


def _count_computed() -> list[int]:
    """Count the micro-batches that the stage computes, a number for each request."""
    computed: list[int] = []
    original = Stage._compute

    def compute(self: Stage, taken: Tensor, *side: torch.cuda.Stream) -> object:
        if computed:
            computed[-1] += 1
        return original(self, taken, *side)

    Stage._compute = compute  # type: ignore[method-assign]
    return computed


def answers_early() -> None:
    """All leave on the first stage, and the last one does not go on before that answer is there; then nobody leaves."""
    network, there = plain(), Path("there")
    example = batch_of("plain", 16)
    with pipelined(network, example, split_size=4, timeout_s=10.0) as run:
        if not run.is_first:
            original, come = run.stage.forward, []

            def forward(*given: Tensor) -> object:
                come.append(given)
                while len(come) == 3 and not there.exists():  # the last micro-batch of the first request
                    time.sleep(0.01)
                return original(*given)

            run.stage.forward = forward  # type: ignore[method-assign, assignment]
            run.serve()
            return
        refused = []
        for x in (torch.randn(3, 5), example[:0], example.double(), [1]):
            try:
                run(x)
            except (ValueError, TypeError) as error:
                refused.append(str(error))
        network.set_rules(0.0)
        last = [tuple(run(batch_of("plain", 9)))]
        there.touch()
        network.set_rules(1.0)
        last.append(tuple(run(batch_of("plain", 9))))
        torch.save((refused, *last), "0.pt")


def from_a_checkpoint() -> None:
    network = load_checkpoint("saved", plain().backbone.to("meta")).network
    with pipelined(network, batch_of("plain", 8), split_size=4, stages=["2"], device="cpu") as run:
        answered = run(batch_of("plain", 11) if run.is_first else None)
        read = [name for name, each in network.backbone.named_parameters() if not each.is_meta]
    torch.save((None if answered is None else tuple(answered), read), f"{os.environ['RANK']}.pt")


def one_after_another() -> None:
    """Pipelines that join by themselves, and one in a process group of the caller's."""
    found = []
    for size in (4, 3):
        if size == 3:
            torch.distributed.init_process_group("gloo")
        network = plain()
        network.set_rules(0.4)
        with pipelined(network, batch_of("plain", 8), split_size=size) as run:
            answered = run(batch_of("plain", 11) if run.is_first else None)
            found.append(None if answered is None else tuple(answered))
    torch.save(found, f"{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


def folded() -> None:
    """Weights that are folded into others are changed between two requests."""
    network, x = normed(), batch_of("plain", 7)
    found = []
    with pipelined(network, batch_of("plain", 8), split_size=4, trunk="cudnn") as run:
        for _ in range(2):
            answered = run(x if run.is_first else None)
            found.append(None if answered is None else tuple(answered))
            with torch.no_grad():
                network.backbone[0][1].weight.mul_(1.5)
            run.refresh()
    torch.save(found, f"{os.environ['RANK']}.pt")


if __name__ == "__main__":  # under torchrun itself
    answer()
