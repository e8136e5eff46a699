"""Eager passes on a GPU: few launches, right answers and lifetimes of tensors, under conditions made to break them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchvision
from auxhead.model import EagerRunner, EarlyExitNetwork, ExitResult, FusedAuxHead
from support import graph_runner_cases
from support.example_models import needs_gpu
from support.one_by_one import one_by_one
from torch import Tensor

pytestmark = [*needs_gpu, pytest.mark.usefixtures("repeatable")]
TAPS = ("layer1.0", "layer2.1", "layer3.0", "layer4.0")
DELAY = 2_000_000  # cycles, about 1 ms: longer than the whole forward takes


def images(samples: int, side: int = 64) -> Tensor:
    x = torch.randn(samples, 3, side, side, device="cuda", dtype=torch.float16)
    return x.to(memory_format=torch.channels_last)


def network(side: int = 64, classes: int = 10) -> EarlyExitNetwork:
    """Every exit takes its share of random images."""
    backbone = torchvision.models.resnet18(num_classes=classes).cuda().half().eval()
    backbone = backbone.to(memory_format=torch.channels_last)
    heads = {tap: FusedAuxHead(None, classes) for tap in TAPS}
    net = EarlyExitNetwork(backbone, heads, example_input=images(1, side)).eval()
    with torch.no_grad():
        for head, logits in zip(net.heads, net.logits(images(32, side)), strict=False):
            head.rule.threshold = torch.softmax(logits.float(), 1).amax(1).quantile(0.6).item()
    torch.cuda.synchronize()
    return net


def hold_up(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY)


def spoil(shapes: list[torch.Size]) -> None:
    """Write NaN into whatever memory of these sizes the current stream may reuse."""
    blocks = [torch.full(shape, float("nan"), device="cuda", dtype=torch.float16) for shape in shapes for _ in range(4)]
    del blocks


def tap_shapes(net: EarlyExitNetwork, x: Tensor) -> list[torch.Size]:
    shapes: list[torch.Size] = []
    handles = [
        net.backbone.get_submodule(tap).register_forward_hook(lambda _m, _i, y: shapes.append(y.shape)) for tap in TAPS
    ]
    with torch.no_grad():
        net.backbone(x)
    for handle in handles:
        handle.remove()
    return shapes


def assert_same(found: ExitResult, wanted: ExitResult) -> None:
    graph_runner_cases.assert_same(found, wanted, tolerance=1e-5)


def truth(net: EarlyExitNetwork, x: Tensor) -> ExitResult:
    result = one_by_one(net, x)
    torch.cuda.synchronize()
    return result


@pytest.mark.parametrize("stop", [False, True])
def test_features_and_answers_live_while_memory_is_reused(stop: bool) -> None:
    """Everything that the backbone or a former answer frees is spoilt at once, and the stream is held up."""
    net, x = network(), images(8)
    wanted = truth(net, x)
    assert wanted.exit_index.unique().numel() > 1
    shapes = tap_shapes(net, x)
    handles = [part.register_forward_hook(lambda *_: spoil(shapes)) for part in net.backbone.children()]
    for run in range(100):
        if run % 3:
            hold_up(torch.cuda.current_stream())
        result = net(x, stop=stop)
        spoil(shapes)
        spoil([torch.Size([8, 10])])
        assert_same(result, wanted)
    for handle in handles:
        handle.remove()


def kernels_by_stream(run: Callable[[], object], folder: Path) -> list[tuple[str, int]]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    path = folder / "trace.json"
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [(event["name"], event["args"]["stream"]) for event in events if event.get("cat") == "kernel"]


def test_all_exits_are_one_launch_on_the_callers_stream(tmp_path: Path) -> None:
    net, x = network(), images(8)
    net.set_rules(1.0)
    for runner in (EagerRunner(net), net):
        for stop, launches in ((False, 1), (True, len(TAPS) + 1)):
            runner(x, stop=stop)
            kernels = kernels_by_stream(lambda runner=runner, stop=stop: runner(x, stop=stop), tmp_path)
            assert sum(name.startswith("exit_kernel") for name, _ in kernels) == launches
            assert len({stream for _, stream in kernels}) == 1


def test_graphs_of_one_network_run_at_the_same_time() -> None:
    net, batches = network(), [images(8) for _ in range(2)]
    wanted = [truth(net, x) for x in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    graphs, answers = [], []
    with torch.cuda.stream(streams[0]):
        net(batches[0])
    torch.cuda.synchronize()
    for x in batches:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            answers.append(net(x))
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        net(batches[0])
    for found, right in zip(answers, wanted, strict=True):
        assert_same(found, right)
