"""Branches of a backbone on lanes of their own on a GPU: each wait of a plan is needed, and runners answer rightly."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from auxhead.kernels.cuda.lifetimes import MemoryPool
from auxhead.model import EarlyExitNetwork, FusedAuxHead, Trunk, make_runner
from auxhead.model.listening.taps import listening
from auxhead.model.runners.capture import Capture, Graph, warm_up
from auxhead.model.trunk.branches import MOST_BESIDE
from support.trunk_cases import Inception, made, trunk_outputs
from torch import Tensor, nn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

#: Streams on which what is slow takes its time: one lane alone, since whoever waits for another one waits long enough.
slow_streams: list[torch.cuda.Stream] = []


def slowly(_layer: nn.Module, x: Tensor) -> Tensor:
    """Take a millisecond or two, so that who does not wait for it reads what was there before."""
    if torch.cuda.current_stream() in slow_streams:
        torch.cuda._sleep(2_000_000)
    return F.softsign(x)


def captured(trunk: Trunk, x: Tensor, slow: int) -> tuple[Graph, list[Tensor]]:
    """A graph of a trunk with its branches side by side, one lane of them slow, and what it writes."""
    main, *beside = streams = [torch.cuda.Stream() for _ in range(MOST_BESIDE + 1)]
    slow_streams[:] = [streams[slow]]
    capture, found = Capture(x.device, MemoryPool(x.device)), []

    def forward() -> None:
        found.clear()
        with listening(trunk.module, Inception.taps, lambda _index, y: found.append(y.clone()), trunk.reading):
            y = trunk.run(x.contiguous(memory_format=trunk.memory_format), beside)
        found.append(y if trunk.classifier is None else trunk.classifier.logits(y))

    with torch.no_grad():
        warm_up(forward, lambda: None, main)
        with capture.capturing(main, trunk.module):
            forward()
    return capture.graphs[0], found


def answers(trunk: Trunk, x: Tensor, slow: int) -> bool:
    """Whether a graph that is captured anew answers for another batch as the trunk does in line."""
    graph, found = captured(trunk, x, slow)
    x.normal_()
    for each in found:
        each.fill_(float("nan"))
    graph.launch(torch.cuda.current_stream())
    torch.cuda.synchronize()
    return all(torch.equal(*pair) for pair in zip(found, trunk_outputs(trunk, Inception.taps, x), strict=True))


@torch.no_grad()
def test_lanes_wait_for_each_other_in_a_graph(monkeypatch) -> None:
    """Without any one wait of the plan an answer is wrong, or the capture fails."""
    torch.manual_seed(0)
    monkeypatch.setattr(nn.Softsign, "forward", slowly)  # a layer of PyTorch's: one of the user's joins all lanes
    backbone, x = Inception(nn.Softsign).cuda().eval(), torch.randn(2, 3, 12, 12, device="cuda")
    trunk = made(backbone, Inception.taps, x, "branched")
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        assert all(answers(trunk, x, lane) for lane in range(MOST_BESIDE + 1))
        steps, waits = trunk.branches, 0
        for number, step in enumerate(steps):
            for each in step.waits:
                waits += 1
                less = step._replace(waits=tuple(one for one in step.waits if one != each))
                mutant = replace(trunk, branches=[*steps[:number], less, *steps[number + 1 :]])
                try:
                    assert not answers(mutant, x, steps[each].lane), (step, each)
                except RuntimeError:  # a lane that does not capture
                    torch.cuda.synchronize()
        assert waits > 8 and answers(trunk, x, 0)


@pytest.mark.parametrize("exits", ["overlapped", "polled", "gated"])
@pytest.mark.usefixtures("repeatable")
def test_runners_on_branches(exits: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 12, 12, device="cuda")
    heads = {tap: FusedAuxHead(8, 5) for tap in ("stem", "first")}
    network = EarlyExitNetwork(Inception(), heads, example_input=x.cpu()).cuda().eval()
    for threshold in (0.0, 1.0):
        for head in network.exit_heads:
            head.rule.threshold = threshold
        with make_runner(network, x, exits=exits, batch_sizes=(4,), trunk="branched") as runner:
            assert runner.trunk.side_by_side
            for _ in range(3):
                found, wanted = runner(x), network(x)
                assert found.exit_index.equal(wanted.exit_index)
                torch.testing.assert_close(found.confidence, wanted.confidence, atol=1e-2, rtol=1e-2)
                x.normal_()
