"""torch.compile on a GPU, Inductor and CUDA graph trees included, of heads and networks."""

from collections.abc import Iterator

import pytest
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead, make_runner
from support.example_models import needs_gpu
from support.graph_runner_cases import WAYS, assert_same, clear_batches, images, network
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = [*needs_gpu, pytest.mark.usefixtures("repeatable")]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()  # lets go of the memory of its graphs


def assert_close(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


def head() -> FusedAuxHead:
    return FusedAuxHead(6, 5, rule=0.25).cuda().eval()


def features(samples: int) -> Tensor:
    return 3 * torch.randn(samples, 6, 9, 9, device="cuda")


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_heads_answer_as_in_eager_mode(mode: str) -> None:
    """Inputs change from call to call, two batch sizes take turns (two graphs), and rules change in between."""
    module = head()
    with torch.no_grad():
        compiled = torch.compile(module, mode=mode, fullgraph=True)
        for call in range(12):
            x = features(4 if call % 2 else 7)
            module.rule.threshold, module.rule.temperature = 0.05 + 0.07 * call, 1.0 + 0.2 * call
            torch.compiler.cudagraph_mark_step_begin()
            found = [one.clone() for one in compiled(x)]
            assert_close(found, module(x))  # an eager call in between
        x = features(7)
        wanted = [one.clone() for one in module(x)]
        for _ in range(3):
            assert_close(module(x), wanted)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_logits_of_a_network_are_one_graph(mode: str) -> None:
    net = network(torch.float32)
    compiled = torch.compile(net.logits, mode=mode, fullgraph=True)
    for samples in (4, 7, 4, 7, 4):
        x = images(samples, torch.float32)
        with torch.no_grad():
            torch.compiler.cudagraph_mark_step_begin()
            assert_close([one.clone() for one in compiled(x)], net.logits(x))
    torch.compiler.cudagraph_mark_step_begin()
    torch.stack(compiled(images(4, torch.float32))).logsumexp(-1).sum().backward()
    found = [parameter.grad.clone() for parameter in net.heads.parameters()]
    assert all(gradient.isfinite().all() and gradient.any() for gradient in found)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_network_answers_as_in_eager_mode(mode: str) -> None:
    """Its streams may break the graph, but change no answer; eager calls and runners go on beside it."""
    net = network()
    batches = clear_batches(net, [5, 8, 5, 8, 5, 8])
    compiled = torch.compile(net, mode=mode)
    for x in batches:
        torch.compiler.cudagraph_mark_step_begin()
        found = compiled(x)
        assert_same(type(found)(*(one.clone() for one in found)), net(x))
    net.set_rules(0.0)
    torch.compiler.cudagraph_mark_step_begin()
    assert compiled(batches[0]).exit_index.eq(0).all()


def test_runners_are_made_and_answer_after_graph_trees_ran(way: str) -> None:
    """They clear cuBLAS's workspaces, and take memory in pools of their own."""
    net = network()
    (x,) = clear_batches(net, [8])
    wanted = net(x)
    before = make_runner(net, x, batch_sizes=(1, 8), **WAYS[way])
    module = head()
    with torch.no_grad():
        compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)
        for _ in range(4):
            compiled(features(4))
    after = make_runner(net, x, batch_sizes=(1, 8), **WAYS[way])
    for runner in (before, after):
        assert_same(runner(x), wanted)
    assert_same(net(x), wanted)


def test_a_captured_network_beside_graph_trees() -> None:
    """A user's own capture of eager mode, before and after: heads count in memory that no pool takes back."""
    net: EarlyExitNetwork = network()
    batches = clear_batches(net, [8, 8, 8])
    module = head()
    with torch.no_grad():
        compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)
        for _ in range(3):
            compiled(features(4))
        static, graph = batches[0].clone(), torch.cuda.CUDAGraph()
        net(static)
        with torch.cuda.graph(graph):
            result = net(static)
        for x in batches:
            static.copy_(x)
            graph.replay()
            torch.compiler.cudagraph_mark_step_begin()
            compiled(features(4))
            assert_same(result, net(x))


def test_rules_of_heads_without_memory_are_assigned() -> None:
    with FakeTensorMode():
        module = FusedAuxHead(6, 5, device="cuda")
        module.rule.threshold = 0.25
    assert module.rule.threshold == 0.25 and module.rule.threshold_tensor.is_cuda
