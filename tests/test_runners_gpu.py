"""Runners that replay CUDA graphs: the same answers as the eager runner, whatever was asked before and around them."""

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torchvision
from auxhead.autotune.correctness import logits_of_exits
from auxhead.model import EagerRunner, EarlyExitNetwork, ExitResult, FusedAuxHead, Trunk, make_runner, make_trunk
from auxhead.model.graph_runner import GraphRunner
from example_models import SmallNet, needs_gpu
from torch import Tensor, nn

pytestmark = needs_gpu

WAYS = {
    "overlapped": {"exits": "overlapped"},
    "polled": {"exits": "polled"},
    "gated": {"exits": "gated", "lag": 0},
    "gated, lag 1": {"exits": "gated", "lag": 1},
}
#: How far apart two right confidences may be: batch sizes and convolution algorithms round differently.
TOLERANCE = {torch.float16: 4e-3, torch.float32: 2e-4}
DELAY = 20_000_000  # cycles, some 10 ms: longer than the host takes for many requests


@pytest.fixture(autouse=True)
def _stops_at_every_tap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut and gate networks that are too small for it to pay."""
    monkeypatch.setattr("auxhead.model.polled_runner._LEAST_SEGMENT_US", 0.0)
    monkeypatch.setattr("auxhead.model.gated_runner._LEAST_GATED_US", 0.0)


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield
    torch.cuda.synchronize()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


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
def exits_at(net: EarlyExitNetwork, place: int) -> Iterator[None]:
    """Every sample leaves at one place, the classifier's being the last."""
    before = [head.rule.threshold for head in net.heads]
    for i, head in enumerate(net.heads):
        head.rule.threshold = 0.0 if i == place else 1.0
    try:
        yield
    finally:
        for head, threshold in zip(net.heads, before, strict=True):
            head.rule.threshold = threshold


def near_a_decision(net: EarlyExitNetwork, trunk: Trunk, x: Tensor, tolerance: float) -> Tensor:
    """[N] bool: within rounding of a threshold on the way, or of another label at the exit."""
    wanted = EagerRunner(net, trunk=trunk)(x)
    classifier = trunk.classifier
    probs = logits_of_exits(
        trunk.module,
        net.taps,
        [lambda y, head=head: head(y).probs for head in net.heads],
        x.contiguous(memory_format=trunk.memory_format),
        lambda y: torch.softmax(y.float(), 1) if classifier is None else classifier(y).probs,
    )
    near = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for place, at_exit in enumerate(probs):
        top = at_exit.sort(1, descending=True).values
        if place < len(net.taps) and 0.0 < (threshold := net.heads[place].rule.threshold) < 1.0:
            near |= (wanted.exit_index >= place) & ((top[:, 0] - threshold).abs() <= tolerance)
        if top.shape[1] > 1:
            near |= (wanted.exit_index == place) & (top[:, 0] - top[:, 1] <= tolerance)
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
    places = net(x).exit_index.tolist()
    firsts = [places.index(place) for place in sorted(set(places))]
    assert len(firsts) == len(net.taps) + 1
    order = firsts + [i for i in range(len(x)) if i not in firsts]
    return x[order], torch.tensor([places[i] for i in order], device=x.device)


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


# The same answers as eager


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
def test_every_batch_size_answers_as_eager(way: str, trunk: str, dtype: torch.dtype) -> None:
    """From 1 to 130: exact, padded and split batches, one after another without a wait, each of other samples."""
    net, x = network(dtype), images(130, dtype)
    eager_trunk = make_trunk(net.backbone, net.taps, x[:2], trunk)
    eager = EagerRunner(net, trunk=eager_trunk)
    near = near_a_decision(net, eager_trunk, x, TOLERANCE[dtype])
    assert near.float().mean() <= (0.1 if dtype == torch.float16 else 0.03), "too much would be excused"
    assert eager(x).exit_index.unique().numel() == 4
    runner = made(net, way, (1, 8, 32, 64), trunk=trunk)
    found = [runner(x.roll(n, 0)[:n]) for n in range(1, 131)]
    excused = sum(
        assert_same(result, eager(x.roll(n, 0)[:n]), TOLERANCE[dtype], near.roll(n, 0)[:n])
        for n, result in enumerate(found, start=1)
    )
    assert excused <= 0.03 * sum(range(1, 131))
    runner.close()


@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
def test_all_leave_where_they_should_and_rules_change_without_a_recapture(way: str, trunk: str) -> None:
    net = network()
    runner = made(net, way, trunk=trunk)
    eager = make_runner(net, images(2), exits="eager", trunk=trunk)
    eager_trunk = make_trunk(net.backbone, net.taps, images(2), trunk)
    for place in (0, 3, 1, 2, 3, 0):
        for samples in (8, 1, 5, 17):
            x = images(samples)
            with exits_at(net, place):
                found, wanted = runner(x), eager(x)
                near = near_a_decision(net, eager_trunk, x, TOLERANCE[torch.float16])
            assert found.exit_index.eq(place).all() and found.label.dtype == torch.int64
            assert_same(found, wanted, near=near)
    runner.close()


def test_temperature_and_enabled_are_followed(way: str) -> None:
    net = network()
    runner, (x,) = made(net, way), clear_batches(net, [8])
    with exits_at(net, 0):
        sharp = runner(x).confidence
        net.heads[0].rule.temperature = 8.0
        flat = runner(x)
        assert (flat.confidence < sharp).all() and flat.exit_index.eq(0).all()
        net.heads[0].rule.enabled = False
        assert runner(x).exit_index.eq(3).all()
        net.heads[0].rule.enabled = True
        assert_identical(runner(x), flat)


MODELS = {
    "resnet18": ("layer1", "layer2.0", "layer3"),
    "mobilenet_v3_small": ("features.3", "features.8"),
    "densenet121": ("features.transition1", "features.transition2"),
}


@pytest.mark.parametrize("model", MODELS)
def test_torchvision_models_as_they_are(way: str, model: str) -> None:
    torch.backends.cudnn.deterministic = False  # such algorithms cannot be captured in the body of a node
    backbone = getattr(torchvision.models, model)(num_classes=10)
    net = with_heads(backbone, MODELS[model], images(64, torch.float32, 64), torch.float32)
    example = images(2, torch.float32, 64)
    runner, trunk = made(net, way, (4,), example=example), make_trunk(net.backbone, net.taps, example)
    labels = set()
    for samples in (4, 3):
        for place in range(len(net.taps) + 1):
            x = images(samples, torch.float32, 64)
            with exits_at(net, place):
                found, wanted = runner(x), net(x)
                near = near_a_decision(net, trunk, x, 5e-3)
            assert found.exit_index.eq(place).all()
            assert_same(found, wanted, 5e-3, near)
            labels.update(wanted.label.tolist())
    assert len(labels) > 1
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())
    runner.close()


def test_an_inductor_trunk(way: str) -> None:
    if way != "polled":
        pytest.skip("compiling takes long: once is enough")
    net = network()
    runner, batches = made(net, way, (8,), trunk="inductor"), clear_batches(net, [8, 5])
    for x in batches:
        assert_same(runner(x), net(x), 1e-2)


class Vectors(nn.Module):
    """Taps that return [N, T, D] and [N, D]."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.tokens = nn.Sequential(nn.Linear(12, 24), nn.GELU())
        self.vector = nn.Sequential(nn.Linear(24, 20), nn.GELU())
        self.fc = nn.Linear(20, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.vector(self.tokens(x).mean(1)))


@pytest.mark.parametrize("classes", [1, 2, 3000])
def test_vectors_tokens_and_any_number_of_classes(way: str, classes: int) -> None:
    x = torch.randn(12, 6, 12, device="cuda") + 2 * torch.randn(12, 1, 12, device="cuda")
    heads = {"tokens": FusedAuxHead(None, classes), "vector": FusedAuxHead(None, classes, pool="none")}
    net = EarlyExitNetwork(Vectors(classes).cuda(), heads, example_input=x).eval()
    for head in net.heads:
        with torch.no_grad():
            head.linear.weight.mul_(10)
    runner = made(net, way, (1, 8), example=x[:1])
    for place in range(3):
        with exits_at(net, place):
            for samples in (1, 8, 3, 12):
                wanted = net(x[:samples])
                assert wanted.exit_index.eq(place).all()
                top = wanted.probs.sort(1, descending=True).values
                near = None if classes == 1 else top[:, 0] - top[:, 1] <= 1e-3
                assert_same(runner(x[:samples]), wanted, 1e-3, near)


def test_heads_without_probabilities(way: str) -> None:
    net = network(return_probs=False)
    runner = made(net, way)
    for samples in (3, 11):
        x = images(samples)
        found = runner(x)
        assert found.probs is None and found.label.shape == (samples,)
        with exits_at(net, 1):
            assert torch.allclose(runner(x).confidence, net(x).confidence, atol=4e-3)


# What skips work, and what does not


class CountingNet(SmallNet):
    """Counts on the device how often each of its four segments ran."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(4, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        for place, tap in enumerate(SmallNet.taps):
            self.runs[place].add_(1)
            x = self.get_submodule(tap)(x)
        self.runs[3].add_(1)
        return self.fc(x.mean((2, 3)))


#: The last segment that runs when all leave at the head with this place, or never.
LAST_SEGMENT = {"overlapped": (3, 3, 3), "polled": (1, 2, 3), "gated": (0, 1, 2), "gated, lag 1": (1, 2, 3)}


@pytest.mark.parametrize("samples", [8, 3, 1])
def test_an_exit_skips_the_rest_of_the_network(way: str, samples: int) -> None:
    net = network(backbone=CountingNet())
    runner, x = made(net, way), images(samples)
    for place, last in enumerate((*LAST_SEGMENT[way], 3)):
        with exits_at(net, place):
            net.backbone.runs.zero_()
            runner(x)
            torch.cuda.synchronize()
        ran = net.backbone.runs.tolist()
        assert ran == [int(segment <= last) for segment in range(4)], (place, ran)


def test_padding_neither_answers_nor_holds_a_batch_open(way: str) -> None:
    """The rows that pad a batch hold samples that are never sure, of the request before."""
    net = network(backbone=CountingNet())
    runner, x = made(net, way, (8,)), images(64)
    with exits_at(net, 0):
        order = net(x).confidence.argsort()
    unsure, sure = x[order[:8]], x[order[-3:]]
    net.set_rules({"block0": net.heads[0].rule.threshold, "block1": 1.0, "block2": 1.0})
    for _ in range(3):
        assert runner(unsure).exit_index.eq(3).all()
        torch.cuda.synchronize()
        net.backbone.runs.zero_()
        found = runner(sure)
        torch.cuda.synchronize()
        assert found.exit_index.tolist() == [0, 0, 0] and found.probs.shape[0] == 3
        assert net.backbone.runs.tolist() == [int(s <= LAST_SEGMENT[way][0]) for s in range(4)]
        mixed = torch.cat([sure[:1], unsure[:2]])
        assert runner(mixed).exit_index.tolist() == [0, 3, 3]


# One request after another


@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
def test_back_to_back_requests_without_a_wait(way: str, trunk: str) -> None:
    """Sizes and inputs alternate; earlier requests left early, and results stay what they were."""
    net = network()
    runner = made(net, way, trunk=trunk)
    eager = make_runner(net, images(2), exits="eager", trunk=trunk)
    batches = clear_batches(net, [1, 5, 8, 1, 3, 12, 1, 8], make_trunk(net.backbone, net.taps, images(2), trunk))
    wanted = [eager(x) for x in batches]
    assert any(result.exit_index.max() < 3 for result in wanted), "none leaves early"
    torch.cuda.synchronize()
    hold_up(torch.cuda.current_stream())
    found = [runner(x) for _ in range(25) for x in batches]
    for i, result in enumerate(found):
        assert_same(result, wanted[i % len(batches)])


@pytest.mark.parametrize("first", [True, False], ids=["first request elsewhere", "later"])
def test_two_streams_of_callers_alternate(way: str, first: bool) -> None:
    """Inputs come late on their own stream, are overwritten at once, and answers are used on that stream."""
    net = network()
    runner, batches = made(net, way), clear_batches(net, [8, 5, 1, 8])
    wanted = [net(x) for x in batches]
    if not first:
        runner(batches[0])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream(priority=-1), torch.cuda.default_stream()]
    found = []
    for i in range(60):
        x, stream = batches[i % 4], streams[i % 3]
        with torch.cuda.stream(stream):
            late = torch.full_like(x, float("nan"))
            torch.cuda._sleep(200_000)
            late.copy_(x)
            result = runner(late)
            late.fill_(float("nan"))
            del late
            spoil()
            found.append(ExitResult(*(field.clone() for field in result)))
            del result
    for i, result in enumerate(found):
        assert_same(result, wanted[i % 4])


@pytest.mark.parametrize("way", ["overlapped", "gated", "gated, lag 1"])
def test_the_host_does_not_wait(way: str) -> None:
    net = network()
    runner, (x,) = made(net, way), clear_batches(net, [8])
    wanted, stream = net(x), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        runner(x)
        stream.synchronize()
        torch.cuda._sleep(500_000_000)
        result = runner(x)
        assert not stream.query(), "the host has waited for the device"
    stream.synchronize()
    assert_same(result, wanted)


def test_no_call_of_cuda_waits(way: str) -> None:
    net = network()
    runner, batches = made(net, way), clear_batches(net, [8, 5, 1, 12])
    wanted = [net(x) for x in batches]
    pinned = [x.cpu().pin_memory() for x in batches]
    for x in (*batches, *pinned):
        runner(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [runner(x) for _ in range(3) for x in (*batches, *pinned)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for i, result in enumerate(found):
        assert_same(result, wanted[i % 4])


def test_a_steady_state_takes_no_memory_from_the_device(way: str) -> None:
    net = network()
    runner, batches = made(net, way), [images(n) for n in (8, 5, 1, 8)]

    def hundred() -> None:
        for i in range(100):
            runner(batches[i % 4])
        torch.cuda.synchronize()

    hundred()
    names = ("segment.all.allocated", "num_device_alloc", "num_device_free", "num_alloc_retries", "num_ooms")
    before = {name: torch.cuda.memory_stats()[name] for name in names}
    held = torch.cuda.memory_allocated()
    hundred()
    assert {name: torch.cuda.memory_stats()[name] for name in names} == before
    assert torch.cuda.memory_allocated() == held


# What a request may be


def test_inputs_from_anywhere_and_of_any_layout(way: str) -> None:
    net = network()
    runner, (x,) = made(net, way), clear_batches(net, [5])
    wanted = runner(x)
    assert wanted.exit_index.device == x.device
    wide = torch.zeros(5, 3, 32, 64, device="cuda", dtype=x.dtype)
    wide[..., ::2] = x
    others = {
        "pageable": x.cpu(),
        "pinned": x.cpu().pin_memory(),
        "pageable, channels_last": x.cpu().to(memory_format=torch.channels_last),
        "strided": wide[..., ::2],
        "strided on the CPU": wide.cpu()[..., ::2],
        "channels_last": x.to(memory_format=torch.channels_last),
        "with gradient": x.clone().requires_grad_(),
    }
    for name, other in others.items():
        assert torch.equal(other.cuda(), x), name
        runner(images(8))  # another one in between
        found = runner(other)
        assert_identical(found, wanted)
        assert not found.confidence.requires_grad and found.label.is_cuda, name
    one = x[:1].expand(8, -1, -1, -1)
    assert_identical(runner(one), runner(one.contiguous()))


BAD_INPUTS = {
    "no tensor": (lambda x: [1.0], TypeError, "x: got list, wants a torch.Tensor"),
    "dtype": (lambda x: x.float(), TypeError, "x: got torch.float32, wants torch.float16"),
    "shape": (lambda x: x[..., :31], ValueError, r"x: got shape \[5, 3, 32, 31\], wants \[N, 3, 32, 32\]"),
    "a sample": (lambda x: x[0], ValueError, r"wants \[N, 3, 32, 32\]"),
    "a number": (lambda x: x[0, 0, 0, 0], ValueError, r"wants \[N, 3, 32, 32\]"),
    "empty": (lambda x: x[:0], ValueError, "N >= 1"),
    "device": (lambda x: x.to("meta"), ValueError, "x: got device meta, wants cuda:"),
}


def test_errors_launch_nothing(way: str) -> None:
    net = network(backbone=CountingNet())
    runner, (x,) = made(net, way), clear_batches(net, [5])
    wanted = runner(x)
    torch.cuda.synchronize()
    for spoilt, error, message in BAD_INPUTS.values():
        bad = spoilt(x)
        net.backbone.runs.zero_()
        with pytest.raises(error, match=message):
            runner(bad)
        torch.cuda.synchronize()
        assert net.backbone.runs.sum() == 0
        assert_identical(runner(x), wanted)


def test_arguments_that_do_not_fit(way: str) -> None:
    net = network()
    net.backbone.block1.train()
    with pytest.raises(ValueError, match=r"network: in training mode, wants network.eval\(\)"):
        made(net, way)
    net.eval().cpu()
    with pytest.raises(ValueError, match="network: block0.0.weight is on cpu, wants cuda"):
        made(net, way)


# Modes around a call


def test_inference_mode_and_gradients_around_capture_and_call(way: str) -> None:
    net = network()
    (x,) = clear_batches(net, [5])
    wanted = net(x)
    with torch.inference_mode():
        inside = made(net, way)
        assert_same(inside(x), wanted)
    with torch.enable_grad():
        outside = made(net, way)
        assert_same(inside(x), wanted)
        assert_same(outside(x), wanted)
    with torch.inference_mode():
        net.heads[0].rule.threshold = 0.0
        assert outside(x).exit_index.eq(0).all() and inside(x).exit_index.eq(0).all()


def test_autocast_is_refused_at_capture_and_changes_no_call(way: str) -> None:
    net = network(torch.float32)
    runner, x = made(net, way), images(12, torch.float32)
    wanted = runner(x)
    with torch.autocast("cuda", torch.float16):
        assert_identical(runner(x), wanted)
        with pytest.raises(RuntimeError, match="cannot capture under autocast"):
            made(net, way)
    assert_identical(runner(x), wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_default_dtype_and_device_do_not_matter(way: str, dtype: torch.dtype) -> None:
    net = network()
    (x,) = clear_batches(net, [5])
    wanted, default = net(x), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            found = made(net, way, example=x)(x)
    finally:
        torch.set_default_dtype(default)
    assert found.confidence.dtype == found.probs.dtype == torch.float32
    assert_same(found, wanted)


def test_a_capture_of_the_caller_is_refused_and_goes_on(way: str) -> None:
    net = network()
    runner, (x,) = made(net, way), clear_batches(net, [5])
    wanted, number = runner(x), torch.zeros(1, device="cuda")
    example = images(2)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="the current stream is being captured"):
            runner(x)
        with pytest.raises(RuntimeError, match="the current stream is being captured"):
            made(net, way, example=example)
        number += 1
    graph.replay()
    torch.cuda.synchronize()
    assert number.item() == 1
    assert_identical(runner(x), wanted)


# Weights


@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
def test_weights_changed_in_place_are_seen(way: str, trunk: str) -> None:
    net = network()
    runner = made(net, way, trunk=trunk)
    x = images(8)
    for layer in (net.backbone.block0[0], net.heads[0].linear, net.backbone.fc):
        place = 0 if layer is not net.backbone.fc else 3
        with exits_at(net, place):
            before = runner(x)
            with torch.no_grad():
                layer.weight.copy_(torch.randn_like(layer.weight))
            if trunk == "cudnn":
                runner.refresh()
            found, wanted = runner(x), make_runner(net, images(2), exits="eager", trunk=trunk)(x)
        assert (found.probs - before.probs).abs().max() > 0.01, "the change does not show"
        assert ((found.probs - wanted.probs).abs() <= 0.02).all()


def replace_rule(net: EarlyExitNetwork) -> None:
    net.heads[1].rule = type(net.heads[1].rule)(0.5).cuda()


def replace_bias(net: EarlyExitNetwork) -> None:
    net.heads[1].linear.bias = nn.Parameter(torch.zeros(5, device="cuda", dtype=torch.float16))


def replace_weight_memory(net: EarlyExitNetwork) -> None:
    net.heads[1].linear.weight.data = net.heads[1].linear.weight.data.clone()


def replace_linear(net: EarlyExitNetwork) -> None:
    net.heads[1].linear = nn.Linear(12, 5).cuda().half()


@pytest.mark.parametrize("change", [replace_rule, replace_bias, replace_weight_memory, replace_linear])
def test_a_head_given_other_tensors_is_named(change: Callable[[EarlyExitNetwork], None], way: str) -> None:
    if way != "overlapped":
        pytest.skip("the check is in the way in that all share")
    net = network()
    runner = made(net, way)
    runner(images(3))
    change(net)
    with pytest.raises(RuntimeError, match=r"heads\['block1'\]: its .* since the capture"):
        runner(images(3))


def test_a_network_cast_after_the_capture_is_noticed(way: str) -> None:
    net = network()
    runner = made(net, way)
    net.float()
    with pytest.raises(RuntimeError, match=r"heads\['block0'\]: its .* since the capture"):
        runner(images(3))


def test_graphs_never_read_memory_that_was_given_back(way: str) -> None:
    """The backbone gets other memory: the runner answers as it was captured, and refresh() says what is wrong."""
    net = network()
    runner, (x,) = made(net, way), clear_batches(net, [5])
    wanted = runner(x)
    for name, parameter in net.backbone.named_parameters():
        parameter.data = torch.zeros_like(parameter)
        assert name
    spoil()
    assert_identical(runner(x), wanted)
    with pytest.raises(RuntimeError, match=r"network: backbone.block0.0.weight was given other memory"):
        runner.refresh()


# What cannot be captured


class Asking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 + 0.0 * x.float().mean().item())


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.float().sum() > -1e9 else -x


class Failing(nn.Module):
    """Fails in the second capture only: the first one measures the segments."""

    captures = 0

    def forward(self, x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            self.captures += 1
            if self.captures == 2:
                raise ValueError("not twice")
        return x


@pytest.mark.parametrize("asks", [Asking, Branching, Failing])
@pytest.mark.parametrize("block", ["block0", "block1", "block2"])
def test_a_layer_that_cannot_be_captured_is_named_and_nothing_else_suffers(way: str, asks: type, block: str) -> None:
    sound = network()
    sound_runner, (x,) = made(sound, way), clear_batches(sound, [5])
    wanted = sound_runner(x)
    net = network()
    net.backbone.get_submodule(block).append(asks().eval())
    for _ in range(2):
        net.backbone.get_submodule(block)[3].captures = 0
        with pytest.raises(RuntimeError, match=rf"backbone: layer '{block}\.3' cannot be captured.*eager"):
            made(net, way)
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert not torch.cuda.is_current_stream_capturing()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())
    assert_identical(sound_runner(x), wanted)  # captured before
    assert_same(made(sound, way)(x), wanted)  # captured after
    assert_same(net(x), wanted)  # what could not be captured still runs
    assert torch.randn(1000, device="cuda").std() > 0.5
    a, graph = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        b = a * 2 + torch.rand(8, device="cuda")
    graph.replay()
    assert ((b >= 2) & (b <= 3)).all()


# Threads


def test_a_second_thread_is_refused_and_the_lock_is_free_afterwards(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    runner, (x,) = made(net, way), clear_batches(net, [5])
    wanted = runner(x)
    inside, go_on, answer = threading.Event(), threading.Event(), type(runner)._answer
    found: list[object] = []

    def slowly(self: GraphRunner, *arguments: object) -> ExitResult:
        inside.set()
        assert go_on.wait(timeout=60)
        return answer(self, *arguments)

    def call() -> None:
        try:
            found.append(runner(x))
        except BaseException as error:
            found.append(error)

    with monkeypatch.context() as patch:
        patch.setattr(type(runner), "_answer", slowly)
        thread = threading.Thread(target=call)
        thread.start()
        assert inside.wait(timeout=60)
        with pytest.raises(RuntimeError, match="in another thread's call"):
            runner(x)
        with pytest.raises(RuntimeError, match="in another thread's call"):
            runner.refresh()
        go_on.set()
        thread.join()
    assert isinstance(found[0], ExitResult), found
    assert_identical(found[0], wanted)
    with pytest.raises(ValueError, match="x: got shape"):
        runner(x[:, :1])
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert_identical(found[1], wanted)


def test_runners_in_two_threads_at_once(way: str) -> None:
    """Captured on streams of their own: workspaces of cuBLAS, which a graph keeps, are not shared."""
    nets = [network(), network()]
    runners, batches = [made(net, way) for net in nets], clear_batches(nets[0], [8, 5])
    wanted = [net(x) for net, x in zip(nets, batches, strict=True)]
    torch.cuda.synchronize()
    results: list[list[ExitResult]] = [[], []]
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                results[i].extend(runners[i](batches[i]) for _ in range(200))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for i in range(2):
        assert len(results[i]) == 200
        for result in results[i]:
            assert_same(result, wanted[i])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("after", [0, 1])
def test_a_polled_request_that_is_broken_off_spoils_no_other(error: type, after: int) -> None:
    """Heads of the request that was broken off still run, and say that no sample is open."""
    net = network()
    runner, (x, places) = made(net, "polled"), clear_samples(net, 300)
    leaves, stays = x[places == after][:8], x[places == 3][:5]
    assert len(leaves) >= 4 and len(stays) == 5
    wanted, poll = net(stays), runner._poll
    torch.cuda.synchronize()
    for _ in range(6):
        calls = iter(range(10))

        def broken(*arguments: object, calls: Iterator[int] = calls) -> int:
            if next(calls) == after:
                raise error
            return poll(*arguments)

        runner._poll = broken
        hold_up(runner._stream)
        with pytest.raises(error):
            runner(leaves)
        runner._poll = poll
        assert_same(runner(stays), wanted)


# Lives and deaths


def test_two_runners_of_one_network_are_closed_in_either_order(way: str) -> None:
    net = network()
    (x,) = clear_batches(net, [5])
    wanted, streams = net(x), [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for order in ((0, 1), (1, 0)):
        runners = [made(net, way), made(net, "overlapped", trunk="cudnn")]
        results = []
        for _ in range(20):
            for stream, runner in zip(streams, runners, strict=True):
                with torch.cuda.stream(stream):
                    results.append(runner(x))
        runners[order[0]].close()
        spoil()
        results += [runners[order[1]](x) for _ in range(3)]
        runners[order[1]].close()
        spoil()
        for result in results:
            assert_same(result, wanted, 1e-2)


@pytest.mark.parametrize("ended", ["closed", "dropped", "closed by with"])
@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
def test_the_end_of_a_runner_frees_its_memory(way: str, ended: str, trunk: str) -> None:
    net, x = network(), images(5)

    def live() -> GraphRunner | None:
        runner = made(net, way, trunk=trunk)
        runner(x)
        if ended == "closed":
            runner.close()
            runner.close()
        elif ended == "closed by with":
            with runner as entered:
                assert entered is runner
        return None if ended == "dropped" else runner

    def held() -> int:
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated()

    held()
    first = live()  # what libraries allocate once and keep is theirs
    before = held()
    second = live()
    assert held() <= before
    for runner in (first, second):
        if runner is not None:
            with pytest.raises(RuntimeError, match="this runner is closed"):
                runner(x)
            with pytest.raises(RuntimeError, match="this runner is closed"):
                runner.refresh()


def test_a_runner_dropped_while_a_request_is_under_way(way: str) -> None:
    net = network()
    (x,) = clear_batches(net, [8])
    wanted = net(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(5):
        runner = made(net, way)
        if way != "polled":
            hold_up(stream)
        with torch.cuda.stream(stream):
            result = runner(x)
        del runner
        spoil()
        assert_same(result, wanted)


def test_garbage_that_holds_a_runner_does_not_break_a_capture(way: str) -> None:
    net, other = network(), network()
    (x,) = clear_batches(net, [8])
    garbage = [made(other, way)]
    garbage[0](x)
    garbage[0].itself = garbage[0]  # only the collector can free it

    def drop(*_: object) -> None:
        if torch.cuda.is_current_stream_capturing():
            garbage.clear()
            gc.set_threshold(1, 1, 1)

    handle = net.backbone.block1.register_forward_pre_hook(drop)
    thresholds = gc.get_threshold()
    try:
        runner = made(net, way, (8,))
    finally:
        gc.set_threshold(*thresholds)
        handle.remove()
    assert not garbage and gc.isenabled()
    assert_same(runner(x), net(x))


def test_many_gates() -> None:
    """34 nested conditions."""
    blocks, x = 34, torch.randn(3, 16, device="cuda")
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(blocks)), nn.Linear(16, 4))
    heads = {str(place): FusedAuxHead(16, 4, pool="none") for place in range(blocks)}
    net = EarlyExitNetwork(layers, heads, 1.0).cuda().eval()
    runner = made(net, "gated", (4,), example=x)
    for place in (0, 20, 33, 34):
        with exits_at(net, place):
            found, wanted = runner(x), net(x)
        assert found.exit_index.eq(place).all()
        top = wanted.probs.sort(1, descending=True).values
        assert_same(found, wanted, 1e-3, top[:, 0] - top[:, 1] <= 1e-3)
