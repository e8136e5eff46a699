"""``make_runner`` without a GPU: the eager runner on every trunk, and what the others say; see test_runners_gpu.py."""

import re
from types import SimpleNamespace

import pytest
import torch
from auxhead.kernels import ExitBuffers
from auxhead.model import (
    EagerRunner,
    EarlyExitNetwork,
    FusedAuxHead,
    GatedRunner,
    OverlappedRunner,
    PolledRunner,
    make_runner,
)
from auxhead.model.make_runner import EXITS
from auxhead.model.runners import capture
from auxhead.model.runners.graph_runner import GraphRunner
from auxhead.model.runners.overlapped import fork_choices, forks_by_rule
from auxhead.model.runners.polled import PolledBatch
from auxhead.model.runners.segment_times import choose_stops
from support.example_models import SmallNet, plain_heads
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("without_interpreter")
RUNNERS = {"overlapped": OverlappedRunner, "polled": PolledRunner, "gated": GatedRunner}


def images(samples: int) -> Tensor:
    return torch.randn(samples, 3, 8, 8)


def network(rules: object = None) -> EarlyExitNetwork:
    """Exits of random images mix: a sample in three leaves at each head."""
    net = EarlyExitNetwork(SmallNet(), plain_heads(), 0.9 if rules is None else rules, example_input=images(1)).eval()
    if rules is None:
        with torch.no_grad():
            for head, logits in zip(net.heads, net.logits(images(64)), strict=False):
                head.rule.threshold = torch.softmax(logits, 1).amax(1).quantile(0.66).item()
    return net


@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
@pytest.mark.parametrize("samples", [1, 7])
def test_eager_runner_answers_as_the_network(trunk: str, samples: int) -> None:
    net, x = network(), images(samples)
    runner = make_runner(net, images(2), exits="eager", trunk=trunk)
    assert isinstance(runner, EagerRunner)
    found, wanted = runner(x), net(x)
    assert torch.equal(found.exit_index, wanted.exit_index) and torch.equal(found.label, wanted.label)
    torch.testing.assert_close(found.confidence, wanted.confidence)
    torch.testing.assert_close(found.probs, wanted.probs)
    assert samples == 1 or found.exit_index.unique().numel() > 1
    runner.close()


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
def test_eager_runner_follows_rules_that_change(place: int, trunk: str) -> None:
    net = network(1.0)
    runner, x = make_runner(net, images(2), exits="eager", trunk=trunk), images(3)
    assert runner(x).exit_index.eq(3).all()
    if place < 3:
        net.set_rules({SmallNet.taps[place]: 0.0})
    assert runner(x).exit_index.eq(place).all()


def test_eager_runner_of_the_cudnn_trunk_takes_any_layout() -> None:
    net, x = network(), images(6)
    runner, wanted = make_runner(net, images(2), exits="eager", trunk="cudnn"), net(x)
    wide = torch.zeros(6, 3, 8, 16)
    wide[..., ::2] = x
    for other in (x.to(memory_format=torch.channels_last), wide[..., ::2], x.clone().requires_grad_()):
        assert torch.equal(other, x)
        found = runner(other)
        assert torch.equal(found.exit_index, wanted.exit_index) and torch.equal(found.label, wanted.label)
        assert not found.confidence.requires_grad


def test_unknown_names_are_refused() -> None:
    net = network(1.0)
    with pytest.raises(ValueError, match="exits: got 'sometimes', wants one of .*'polled'"):
        make_runner(net, images(1), exits="sometimes")
    for exits in EXITS[:1]:
        with pytest.raises(ValueError, match="kind: got 'fast', wants one of 'as_is'"):
            make_runner(net, images(1), exits=exits, trunk="fast")


@pytest.mark.parametrize("exits", RUNNERS)
def test_graphs_need_a_gpu(exits: str) -> None:
    for make in (lambda *a, **o: make_runner(*a, exits=exits, **o), RUNNERS[exits]):
        with pytest.raises(ValueError, match="example_input: on cpu, wants a CUDA device; elsewhere use 'eager'"):
            make(network(1.0), images(1))


@pytest.mark.parametrize("exits", RUNNERS)
@pytest.mark.parametrize(
    "sizes", [(), (0,), (1, -2), (1.0,), (True,), ("8",), (1, "8"), (1, None), range(2, -1, -1)], ids=str
)
def test_batch_sizes_are_positive_ints(exits: str, sizes: object) -> None:
    wanted = re.escape(f"batch_sizes: got {list(sizes)}, wants positive ints")
    for given in (sizes, (size for size in sizes)):  # a generator is read once, and named all the same
        with pytest.raises(ValueError, match=wanted):
            make_runner(network(1.0), images(1), exits=exits, batch_sizes=given)


@pytest.mark.parametrize("sizes", [8, None])
def test_batch_sizes_are_a_sequence(sizes: object) -> None:
    with pytest.raises(TypeError, match=f"batch_sizes: got {sizes}, wants a sequence"):
        make_runner(network(1.0), images(1), batch_sizes=sizes)


@pytest.mark.parametrize("exits", RUNNERS)
def test_good_batch_sizes_get_as_far_as_the_device(exits: str) -> None:
    for sizes in ((8, 1, 8), [3], range(1, 4), (n for n in (2, 1))):
        with pytest.raises(ValueError, match="wants a CUDA device"):
            make_runner(network(1.0), images(1), exits=exits, batch_sizes=sizes)


@pytest.mark.parametrize("example", [None, "x", [1.0], torch.zeros(()), torch.zeros(0, 3, 8, 8)], ids=str)
@pytest.mark.parametrize("exits", RUNNERS)
def test_the_example_is_a_batch(exits: str, example: object) -> None:
    with pytest.raises(ValueError, match="example_input: wants a tensor"):
        make_runner(network(1.0), example, exits=exits)


@pytest.mark.parametrize("exits", EXITS)
def test_the_network_has_heads(exits: str) -> None:
    with pytest.raises(TypeError, match="network: got SmallNet, wants an EarlyExitNetwork"):
        make_runner(SmallNet().eval(), images(1), exits=exits)


def test_errors_leave_no_hooks_and_no_half_made_runner_complains(recwarn: pytest.WarningsRecorder) -> None:
    net = network(1.0)
    for exits in RUNNERS:
        with pytest.raises(ValueError):
            make_runner(net, images(1), exits=exits)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())
    assert not recwarn.list


@pytest.mark.parametrize("runner", RUNNERS.values())
def test_every_captured_runner_shares_one_way_in(runner: type) -> None:
    """Checks, ordering and locks are in the base class: a runner that replaced them would be without."""
    assert issubclass(runner, GraphRunner)
    assert runner.__call__ is GraphRunner.__call__ and runner.close is GraphRunner.close


def test_a_head_without_probabilities_leaves_them_out() -> None:
    heads = {tap: FusedAuxHead(width, 5) for tap, width in zip(SmallNet.taps, SmallNet.widths, strict=True)}
    heads["block1"].return_probs = False
    net = EarlyExitNetwork(SmallNet(), heads, 0.3, example_input=images(1)).eval()
    assert make_runner(net, images(1), exits="eager")(images(2)).probs is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_answers_are_float32_whatever_the_default_dtype(dtype: torch.dtype) -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        buffers = ExitBuffers.allocate(2, 3, 4, with_probs=True, device=torch.device("cpu"))
    finally:
        torch.set_default_dtype(default)
    assert buffers.confidence.dtype == buffers.probs.dtype == torch.float32
    label, exit_index, confidence, probs = buffers.answer(buffers.packed_answer)
    assert [t.dtype for t in (label, exit_index, confidence, probs)] == [torch.int64] * 2 + [torch.float32] * 2


class Failing(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize("block", SmallNet.taps)
def test_an_error_in_a_capture_names_the_innermost_layer(block: str) -> None:
    net = SmallNet().eval()
    net.get_submodule(block)[1] = Failing(RuntimeError("CUDA error: not permitted\nCompile with TORCH_USE_CUDA_DSA"))
    message = (
        f"backbone: layer '{block}.1' cannot be captured in a CUDA graph (RuntimeError: CUDA error: not permitted); it "
        "may make the host wait, or branch on the value of a tensor. The eager runner runs it as it is"
    )
    with pytest.raises(RuntimeError, match=re.escape(message)), capture._naming_layers(net):
        net(images(1))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())


def test_no_layer_is_blamed_for_a_lack_of_memory() -> None:
    net = SmallNet().eval()
    net.block1[1] = Failing(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory$"), capture._naming_layers(net):
        net(images(1))


def test_runners_that_live_at_once_capture_on_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_free_pairs", {})
    monkeypatch.setattr(capture, "_new_stream", lambda device, priority: object())
    device = torch.device("cuda", 0)
    first, second = (capture.CaptureStreams(device, -1) for _ in range(2))
    mine, other = first.pair, second.pair
    assert first.pair == mine and second.pair == other and len({*mine, *other}) == 4
    first.give_back()
    first.give_back()  # twice is once
    assert capture.CaptureStreams(device, 0).pair != mine, "of another priority"
    assert capture.CaptureStreams(device, -1).pair == mine, "their workspaces are there"
    assert capture.CaptureStreams(device, -1).pair not in (mine, other)


# Where runners fork, cut and gate


def test_heads_fork_where_enough_of_the_trunk_is_left() -> None:
    blocks = [42.0, 16, 18, 16, 17, 16, 22, 20, 3]  # like ResNet-18 with a head after every block
    assert forks_by_rule(blocks, samples=1, classes=1000) == [5] == forks_by_rule(blocks, samples=128, classes=10)
    assert forks_by_rule(blocks, samples=1, classes=10) == [1, 3, 5] == forks_by_rule(blocks, samples=32, classes=1000)
    stages = [50.0, 30, 30, 40]
    assert forks_by_rule(stages, samples=128, classes=10) == [2], "the last of three stages has a fourth to hide behind"
    assert forks_by_rule([100.0, 1], samples=1, classes=10) == [], "a head at the end runs with the classifier"


@pytest.mark.parametrize("last", range(9))
@pytest.mark.parametrize("samples", [1, 32, 128])
def test_what_the_rule_chooses_is_one_of_the_choices(last: int, samples: int) -> None:
    choices = fork_choices(last)
    for classes in (10, 1000):
        assert forks_by_rule([10.0] * (last + 1) + [40.0, 1.0], samples, classes) in choices
    assert choices == sorted(choices, key=len) and len({tuple(choice) for choice in choices}) == len(choices)
    assert choices[0] == [last] and choices[-1] == list(range(last + 1))


@pytest.mark.parametrize("exits", [name for name in EXITS if name != "overlapped"])
def test_only_the_overlapped_runner_forks_at_chosen_taps(exits: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"forks: got () with exits='{exits}', wants None")):
        make_runner(network(1.0), images(1), exits=exits, forks=())


@pytest.mark.parametrize(
    ("forks", "kind", "message"),
    [
        (("block0", "block9"), ValueError, "got 'block9', wants taps of the network: block0, block1, block2"),
        ((0,), ValueError, "got 0, wants taps"),
        ("block0", TypeError, "got 'block0', wants a sequence of taps, or None"),
        (1, TypeError, "got 1, wants a sequence"),
    ],
    ids=str,
)
def test_forks_are_taps(forks: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"forks: {message}"):
        OverlappedRunner(network(1.0), images(1), forks=forks)


@pytest.mark.parametrize(
    ("segments", "stops"),
    [
        ([40.0, 30, 30, 40], [0, 1, 2]),
        ([40.0, 13, 13, 13, 13], [0, 2]),
        ([40.0, 30, 10, 10], [0]),
        ([5.0, 5, 5], []),
    ],
)
def test_stops_are_as_many_as_leave_enough_of_the_trunk_after_each(segments: list[float], stops: list[int]) -> None:
    assert choose_stops(segments, 25.0) == stops


class FakeGraph:
    """Says at once how many samples stay open after the stop before it."""

    def __init__(self, number: int, segments: "FakeBatch") -> None:
        self.number, self.segments = number, segments

    def launch(self, _stream: object) -> None:
        self.segments.launched.append(self.number)
        if self.number > 0:
            still_open = 0 if self.number > self.segments.exit_stop else 4
            self.segments.open_samples[self.number - 1] = (self.segments.on_device << 32) + still_open


class FakeBatch(PolledBatch):
    def __init__(self, stops: int) -> None:
        self.open_samples, self.request, self.on_device = [0] * stops, 0, 0
        self.graphs = [FakeGraph(i, self) for i in range(stops + 1)]
        self.launched: list[int] = []
        self.buffers = SimpleNamespace(packed_answer=torch.zeros(1))

    def fill(self, _x: torch.Tensor) -> None:
        self.on_device += 1

    def empty_answer(self) -> tuple[torch.Tensor, str]:
        return torch.empty(1), "answer"


@pytest.mark.parametrize("stops", [0, 1, 2, 6])
def test_a_polled_request_launches_at_most_one_graph_more_than_it_needs(
    monkeypatch: pytest.MonkeyPatch, stops: int
) -> None:
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    waited: list[object] = []
    stream = SimpleNamespace(wait_event=lambda event: None, query=lambda: True)
    caller = SimpleNamespace(wait_event=waited.append)
    runner = PolledRunner.__new__(PolledRunner)
    runner._stream = stream  # type: ignore[assignment]
    runner._event = SimpleNamespace(record=lambda stream: None)  # type: ignore[assignment]
    captured = FakeBatch(stops)
    for exit_stop in (0, 3, 6, 5, 1, 6, 2, 4):  # the numbers that a request leaves are not the next one's
        captured.exit_stop, captured.launched, waited[:] = exit_stop, [], []
        assert runner._answer_polling(captured, torch.empty(4), caller) == "answer"  # type: ignore[arg-type]
        assert captured.launched == list(range(min(exit_stop + 2, stops + 1)))
        assert len(waited) == (exit_stop >= stops), "the caller's stream waits for the classifier alone"
