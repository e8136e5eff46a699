"""compact=True with simulated graphs: batch sizes that samples move to, and their answers."""

from collections.abc import Iterator

import pytest
import torch
from auxhead.kernels import runs_triton
from auxhead.model import EarlyExitNetwork, ExitResult, make_runner
from auxhead.model.runners.compacting import CompactingRunner, choose_moves
from auxhead.model.runners.graph_runner import GraphRunner
from support.example_models import Skipping, SmallNet, plain_heads
from support.exits_plan_cases import assert_same
from support.graph_runner_cases import polls_of
from support.spread_exits import images
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("without_interpreter")  # what the eager runner answers with

# To which batch samples move


@pytest.fixture
def _costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auxhead.model.runners.compacting._BUBBLE_US", 25.0)
    monkeypatch.setattr("auxhead.model.runners.compacting._MOVE_US", 10.0)


@pytest.mark.usefixtures("_costs")
def test_samples_move_to_the_fastest_batch_that_holds_them() -> None:
    left = {2: 50.0, 4: 60.0, 6: 85.0, 8: 100.0}
    assert choose_moves(left, 8) == [None, 2, 2, 4, 4, 6, 6, None, None]
    assert choose_moves(left, 6) == [None, 2, 2, 4, 4, None, None]
    assert choose_moves({2: 90.0, 4: 60.0, 8: 100.0}, 8) == [None, 4, 4, 4, 4, None, None, None, None]


@pytest.mark.usefixtures("_costs")
def test_samples_stay_where_a_move_saves_less_than_it_costs() -> None:
    assert choose_moves({2: 50.0, 4: 91.0, 8: 100.0}, 8) == [None, 2, 2, *[None] * 6]
    assert choose_moves({2: 75.1, 4: 90.0, 8: 100.0}, 8) == []
    assert choose_moves({2: 50.0, 4: 60.0, 8: 100.0}, 4) == [], "ten are less than the wait for the number"
    assert choose_moves({8: 100.0}, 8) == choose_moves({8: 100.0, 16: 30.0}, 8) == []


@pytest.mark.parametrize("exits", ["eager", "overlapped", "gated", "auto"])
def test_only_the_polled_runner_gathers(exits: str) -> None:
    network = EarlyExitNetwork(SmallNet(), plain_heads(), 0.5).eval()
    with pytest.raises(ValueError, match=f"compact: got True with exits='{exits}', wants False"):
        make_runner(network, torch.randn(2, 3, 8, 8), exits=exits, compact=True)


# What is answered


@pytest.fixture(scope="module")
def simulated() -> Iterator[None]:
    """Every move pays: times are proportional to the batch."""
    if not runs_triton(torch.empty(0)):
        pytest.skip("kernels are not interpreted here")
    from support.simulated_cuda import simulated_cuda

    with simulated_cuda(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphRunner, "_segment_times", lambda runner, x: [1000.0 * len(x)] * (len(runner._heads) + 1))
        yield


def network_of(backbone: nn.Module, **head: object) -> EarlyExitNetwork:
    """At each exit about half of those leave that reach it."""
    net, x = EarlyExitNetwork(backbone, plain_heads(), 0.0).eval(), images(64)
    for head_module in net.heads:
        for name, value in head.items():
            setattr(head_module, name, value)
    with torch.no_grad():
        still_open = torch.ones(len(x), dtype=torch.bool)
        for head_module, logits in zip(net.heads, net.logits(x), strict=False):
            confidence = torch.softmax(logits, 1).amax(1)
            head_module.rule.threshold = confidence[still_open].median().item()
            still_open &= confidence <= head_module.rule.threshold
    return net


def compacting(net: EarlyExitNetwork, sizes: tuple[int, ...], **options: object) -> CompactingRunner:
    return make_runner(net, images(2), exits="polled", batch_sizes=sizes, compact=True, **options)


@pytest.fixture(scope="module")
def shared(simulated: None) -> CompactingRunner:
    """One for several tests: trying out its moves takes seconds in the interpreter."""
    torch.manual_seed(0)
    return compacting(network_of(SmallNet()), (1, 2, 4), trunk="cudnn")


def test_it_says_where_samples_may_move(shared):
    ways = (
        "Gathered after block0 into batches of 1, 2. Gathered after block1 into batches of 1, 2. Gathered after block2"
    )
    said = shared.describe()
    assert f"Batch 4: 4 graphs, cut after block0, block1, block2. {ways} into batches of 1, 2.\n" in said + "\n"
    assert "Batch 1: 4 graphs, cut after block0, block1, block2. Never gathered into a smaller batch." in said


def test_samples_are_answered_in_their_order_whatever_batch_they_end_in(shared):
    batches = [images(samples) for samples in (4, 3, 4, 2, 7, 1, 4)]
    results = [shared(x) for x in batches]  # kept: no result is a view of what the next request writes
    eager = make_runner(shared.network, images(2), exits="eager", trunk="cudnn")
    for x, found in zip(batches, results, strict=True):
        assert_same(found, eager(x))


def test_every_way_down(shared, monkeypatch):
    """Samples that leave at chosen exits: moves at every stop, twice or never, and from a batch that was padded."""
    x = images(200)
    wanted = make_runner(shared.network, x, exits="eager", trunk="cudnn")(x)
    rows = [torch.nonzero(wanted.exit_index == index)[:, 0] for index in range(4)]
    assert min(map(len, rows)) >= 4
    seen = polls_of(shared, monkeypatch)
    for leaves in ((2, 1, 0, 1), (1, 1, 1, 1), (0, 3, 0, 1), (0, 2, 2, 0), (3, 0, 1, 0), (0, 0, 0, 4), (1, 0, 1, 1)):
        chosen = torch.cat([which[:count] for which, count in zip(rows, leaves, strict=True)])
        chosen = chosen[torch.randperm(len(chosen))]
        seen.clear()
        found = shared(x[chosen])
        assert_same(found, ExitResult(*(field[chosen] for field in wanted)))
        size, still_open, expected = 4, len(chosen), []
        for index in range(3):
            still_open -= leaves[index]
            expected.append((size, still_open))
            if still_open == 0:
                break
            size = next(smaller for smaller in (1, 2, 4) if smaller >= still_open)
        assert seen == expected


@pytest.mark.usefixtures("simulated")
def test_stops_at_which_no_move_pays_are_passed_without_a_wait(monkeypatch):
    """What is left after block1 takes as long for every batch size."""
    monkeypatch.setattr(GraphRunner, "_segment_times", lambda runner, x: [100.0, 1000.0 * len(x), 100.0, 100.0])
    net = network_of(SmallNet())
    runner = compacting(net, (2, 4))
    said = runner.describe()
    assert "Batch 4: 4 graphs, cut after block0, block1, block2. Gathered after block0 into batches of 2." in said
    assert "Gathered after block1" not in said and "Gathered after block2" not in said
    for samples in (4, 3, 4, 4):
        x = images(samples)
        assert_same(runner(x), net(x))


@pytest.mark.usefixtures("simulated")
def test_a_network_without_smaller_batches_or_stops_is_as_before(monkeypatch):
    net = network_of(SmallNet())
    x = images(5)
    for sizes in ((4,), (4, 2)):
        if len(sizes) == 2:
            monkeypatch.setattr("auxhead.model.runners.compacting._LEAST_STOP_US", 1e9)
        runner = compacting(net, sizes)
        assert "Never gathered into a smaller batch." in runner.describe()
        assert_same(runner(x), net(x))


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_request_that_is_broken_off_spoils_no_other(shared, monkeypatch, after):
    """It has moved, or not, and the launches of its graphs have counted it."""
    eager = make_runner(shared.network, images(2), exits="eager", trunk="cudnn")
    poll = shared._poll
    x = images(100)
    stays = x[eager(x).exit_index == 3][:1]
    for _ in range(2):
        calls = iter(range(10))

        def broken(captured, index, calls=calls):
            if next(calls) == after:
                raise KeyboardInterrupt
            return poll(captured, index)

        monkeypatch.setattr(shared, "_poll", broken)
        with pytest.raises(KeyboardInterrupt):
            shared(torch.cat([stays, images(3)]))
        monkeypatch.setattr(shared, "_poll", poll)
        for samples in (4, 2, 1, 3):
            x = images(samples)
            assert_same(shared(x), eager(x))


class Transposing(SmallNet):
    """Samples of block1's output lie beside each other in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.block1.append(Transposed())


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)


REFUSED = {
    Skipping: "Gathered after block0 into batches of 2. Not compacted after block1: more than the tap's output is used "
    "after it. Not compacted after block2: more than the tap's output is used after it.",
    Transposing: "Gathered after block0 into batches of 2. Gathered after block2 into batches of 2. Not compacted "
    "after block1: its output is not dense in memory, or lies there otherwise in another batch.",
}


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("backbone", REFUSED)
def test_what_cannot_be_compacted_is_said_and_answered(backbone):
    net = network_of(backbone())
    runner = compacting(net, (2, 4))
    assert f"Batch 4: 4 graphs, cut after block0, block1, block2. {REFUSED[backbone]}" in runner.describe()
    for samples in (4, 4, 3):
        x = images(samples)
        assert_same(runner(x), net(x))
