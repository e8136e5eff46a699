"""Networks, samples and comparisons shared by the GPU tests of graph runners."""

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from auxhead.autotune.measuring.eager_truth import logits_of_exits
from auxhead.model import (
    CompactingRunner,
    EarlyExitNetwork,
    ExitResult,
    FusedAuxHead,
    Trunk,
    make_runner,
    make_trunk,
)
from auxhead.model.runners.graph_runner import GraphRunner
from support.example_models import SmallNet
from support.one_by_one import one_by_one
from torch import Tensor, nn

WAYS = {
    "overlapped": {"exits": "overlapped"},
    "polled": {"exits": "polled"},
    "gated": {"exits": "gated"},
    "compact": {"exits": "polled", "compact": True},
}
#: How far apart two right confidences may be: batch sizes and convolution algorithms round differently.
TOLERANCE = {torch.float16: 4e-3, torch.float32: 2e-4}
DELAY = 20_000_000  # cycles, some 10 ms: longer than the host takes for many requests


def images(samples: int, dtype: torch.dtype = torch.float16, side: int = 32) -> Tensor:
    """Noise in a colour of its own, which outlasts the pooling."""
    colour = 2 * torch.randn(samples, 3, 1, 1, device="cuda")
    return (torch.randn(samples, 3, side, side, device="cuda") + colour).to(dtype)


def with_heads(backbone: nn.Module, taps: Sequence[str], x: Tensor, dtype: torch.dtype, **head: object):
    """Heads that tell one sample from another and let half of those that reach them leave; ``x`` is float32."""
    norms = [layer for layer in backbone.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = None
    with torch.no_grad():
        backbone.cuda().train()(x)
    classes = backbone.eval()(x[:1]).shape[1]
    heads = {tap: FusedAuxHead(None, classes, **head) for tap in taps}
    net = EarlyExitNetwork(backbone, heads, example_input=x[:2]).eval()
    with torch.no_grad():
        for of_head, logits in zip(net.heads, net.logits(x), strict=False):
            of_head.linear.weight.mul_(3 / logits.std(0).mean().clamp_min(1e-3))
            of_head.linear.bias.zero_()
        for of_head, logits in zip(net.heads, net.logits(x), strict=False):
            of_head.rule.threshold = torch.softmax(logits, 1).amax(1).median().item()
    return net.to(dtype)


def network(dtype: torch.dtype = torch.float16, backbone: nn.Module | None = None, **head: object) -> EarlyExitNetwork:
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        torch.manual_seed(0)
        return with_heads(backbone or SmallNet(), SmallNet.taps, images(64, torch.float32), dtype, **head)


def made(net: EarlyExitNetwork, way: str, sizes: Sequence[int] = (1, 8), **options: object) -> GraphRunner:
    example = options.pop("example", None)
    example = images(2, next(net.parameters()).dtype) if example is None else example
    return make_runner(net, example, batch_sizes=sizes, **WAYS[way], **options)


@contextmanager
def exits_at(net: EarlyExitNetwork, index: int) -> Iterator[None]:
    """Every sample leaves at one exit, the last of which is the classifier."""
    before = [head.rule.threshold for head in net.heads]
    for i, head in enumerate(net.heads):
        head.rule.threshold = 0.0 if i == index else 1.0
    try:
        yield
    finally:
        for head, threshold in zip(net.heads, before, strict=True):
            head.rule.threshold = threshold


def near_a_decision(net: EarlyExitNetwork, trunk: Trunk, x: Tensor, tolerance: float) -> Tensor:
    """[N] bool: within rounding of a threshold on the way, or of another label at the exit."""
    wanted = one_by_one(net, x, trunk=trunk)
    classifier = trunk.classifier
    probs = logits_of_exits(
        trunk.module,
        net.taps,
        [lambda y, head=head: head(y).probs for head in net.heads],
        x.contiguous(memory_format=trunk.memory_format),
        lambda y: torch.softmax(y.float(), 1) if classifier is None else classifier(y).probs,
    )
    near = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for index, at_exit in enumerate(probs):
        top = at_exit.sort(1, descending=True).values
        if index < len(net.taps) and 0.0 < (threshold := net.heads[index].rule.threshold) < 1.0:
            near |= (wanted.exit_index >= index) & ((top[:, 0] - threshold).abs() <= tolerance)
        if top.shape[1] > 1:
            near |= (wanted.exit_index == index) & (top[:, 0] - top[:, 1] <= tolerance)
    return near


def assert_same(found: ExitResult, wanted: ExitResult, tolerance: float = 4e-3, near: Tensor | None = None) -> int:
    """Compare with the eager answer; returns how many samples differ near a decision, the only ones that may."""
    torch.cuda.synchronize()
    assert found.label.shape == wanted.label.shape
    differs = (found.label != wanted.label) | (found.exit_index != wanted.exit_index)
    assert not (differs if near is None else differs & ~near).any(), (found, wanted)
    assert ((found.confidence - wanted.confidence).abs() <= tolerance)[~differs].all(), (found, wanted)
    assert (found.probs is None) == (wanted.probs is None)
    if found.probs is not None:
        assert ((found.probs - wanted.probs).abs() <= tolerance)[~differs].all()
    return int(differs.sum())


def assert_identical(found: ExitResult, wanted: ExitResult) -> None:
    torch.cuda.synchronize()
    for name, a, b in zip(ExitResult._fields, found, wanted, strict=True):
        assert torch.equal(a, b), (name, a, b)


def clear_samples(net: EarlyExitNetwork, samples: int, trunk: Trunk | None = None) -> tuple[Tensor, Tensor]:
    """Samples that are not near a decision, the first of them of different exits, and their exits."""
    x = images(samples)
    x = x[~near_a_decision(net, trunk or make_trunk(net.backbone, net.taps, x[:2]), x, 3 * TOLERANCE[torch.float16])]
    indices = net(x).exit_index.tolist()
    firsts = [indices.index(index) for index in sorted(set(indices))]
    assert len(firsts) == len(net.taps) + 1
    order = firsts + [i for i in range(len(x)) if i not in firsts]
    return x[order], torch.tensor([indices[i] for i in order], device=x.device)


def clear_batches(net: EarlyExitNetwork, sizes: Sequence[int], trunk: Trunk | None = None) -> list[Tensor]:
    """Batches of samples that are not near a decision."""
    x, _ = clear_samples(net, 2 * sum(sizes) + 64, trunk)
    return list(x[: sum(sizes)].split(list(sizes)))


def hold_up(stream: torch.cuda.Stream, cycles: int = DELAY) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)


def spoil() -> None:
    """Write NaN into memory that has been given back."""
    for elements in (1 << 6, 1 << 10, 1 << 14, 1 << 18):
        blocks = [torch.full((elements,), float("nan"), device="cuda") for _ in range(16)]
        del blocks


@contextmanager
def untouched(sizes: Sequence[int] = tuple(4 << power for power in range(0, 21, 2)), copies: int = 8) -> Iterator[None]:
    """Memory of others, of sizes in bytes, allocated inside at once and unchanged at the end."""
    blocks = [torch.full((size // 4 or 1,), 7.0, device="cuda") for size in sizes for _ in range(copies)]
    yield
    torch.cuda.synchronize()
    changed = [block.numel() * 4 for block in blocks if not (block == 7.0).all()]
    assert not changed, f"blocks of {changed} bytes were overwritten"


@contextmanager
def captured_elsewhere(
    work: Callable[[], object], stream: torch.cuda.Stream | None = None, mode: str = "global", warm: bool = False
) -> Iterator[Future]:
    """While open, another thread captures: some work before, and the same after, whose outcome the future has."""
    begun, ended, graph = threading.Event(), threading.Event(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()

    def capture() -> object:
        try:
            of_thread = stream or torch.cuda.Stream()
            if warm:  # libraries make handles for each thread
                with torch.cuda.stream(of_thread):
                    work()
                of_thread.synchronize()
            with torch.cuda.graph(graph, stream=of_thread, capture_error_mode=mode):
                work()
                begun.set()
                ended.wait(60)
                return work()
        finally:
            begun.set()

    with ThreadPoolExecutor(1) as thread:
        outcome = thread.submit(capture)
        begun.wait(20)
        try:
            yield outcome
        finally:
            ended.set()
    outcome.result()
    graph.replay()
    torch.cuda.synchronize()


def assert_takes_no_memory(runner: GraphRunner, batches: Sequence[Tensor]) -> None:
    """Let a runner answer a hundred requests, and a hundred more that allocate nothing from the device."""

    def hundred() -> None:
        for i in range(100):
            runner(batches[i % len(batches)])
        torch.cuda.synchronize()

    hundred()
    gc.collect()  # what others left in cycles is not given back in between
    names = ("segment.all.allocated", "num_device_alloc", "num_device_free", "num_alloc_retries", "num_ooms")
    before = {name: torch.cuda.memory_stats()[name] for name in names}
    held = torch.cuda.memory_allocated()
    hundred()
    assert {name: torch.cuda.memory_stats()[name] for name in names} == before
    assert torch.cuda.memory_allocated() == held


def polls_of(runner: CompactingRunner, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Batch size and open samples at each stop of the requests to come."""
    seen: list[tuple[int, int]] = []
    poll = runner._poll

    def polled(captured: object, stop: int) -> int:
        seen.append((captured.size, count := poll(captured, stop)))
        return count

    monkeypatch.setattr(runner, "_poll", polled)
    return seen


class CountingNet(SmallNet):
    """Counts on the device how often each of its four segments ran."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(4, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        for index, tap in enumerate(SmallNet.taps):
            self.runs[index].add_(1)
            x = self.get_submodule(tap)(x)
        self.runs[3].add_(1)
        return self.fc(x.mean((2, 3)))
