"""compact=True on a GPU: answers equal the eager runner's, whatever batches samples go through."""

from collections.abc import Sequence

import pytest
import torch
from auxhead.model import CompactingRunner, EarlyExitNetwork, make_runner
from support.example_models import needs_gpu
from support.graph_runner_cases import (
    CountingNet,
    assert_same,
    assert_takes_no_memory,
    clear_samples,
    exits_at,
    images,
    network,
    polls_of,
)

pytestmark = [*needs_gpu, pytest.mark.usefixtures("repeatable", "every_move_pays")]

SIZES = (1, 8, 32, 64)


def compacting(net: EarlyExitNetwork, sizes: Sequence[int] = SIZES, **options: object) -> CompactingRunner:
    example = options.pop("example", None)
    example = images(2, next(net.parameters()).dtype) if example is None else example
    return make_runner(net, example, exits="polled", compact=True, batch_sizes=sizes, **options)


def test_every_move_from_every_size_at_every_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are chosen by their exits, so that each number of open ones is there where it is wanted."""
    net = network()
    runner, (x, indices) = compacting(net), clear_samples(net, 4000)
    rows = [torch.nonzero(indices == index)[:, 0] for index in range(4)]
    assert min(map(len, rows)) >= 64
    wanted, seen = net(x), polls_of(runner, monkeypatch)
    moved = set()
    for leaves in (
        (26, 19, 13, 6), (32, 24, 7, 1), (63, 0, 0, 1), (0, 56, 0, 8), (0, 0, 63, 1), (32, 0, 31, 1), (0, 32, 24, 8),
        (0, 0, 32, 32), (0, 0, 56, 8), (24, 7, 0, 1), (0, 24, 7, 1), (0, 0, 24, 8), (0, 31, 0, 1), (0, 0, 31, 1),
        (7, 0, 0, 1), (0, 7, 0, 1), (0, 0, 7, 1), (64, 0, 0, 0), (0, 0, 0, 64), (20, 20, 20, 0), (56, 0, 0, 8),
        (31, 0, 0, 1),
    ):  # fmt: skip
        chosen = torch.cat([which[torch.randperm(len(which))[:n]] for which, n in zip(rows, leaves, strict=True)])
        chosen = chosen[torch.randperm(len(chosen))]
        for _ in range(3):
            seen.clear()
            result = runner(x[chosen])
            assert_same(result, type(wanted)(*(field[chosen] for field in wanted)))
        moved |= {(index, a[0], b[0]) for index, (a, b) in enumerate(zip(seen, seen[1:], strict=False)) if a[0] != b[0]}
        assert [count for _, count in seen] == [sum(leaves[p + 1 :]) for p in range(len(seen))]
    pairs = {(64, 32), (64, 8), (64, 1), (32, 8), (32, 1), (8, 1)}
    # after the last head a move shows in no poll
    assert {pair[1:] for pair in moved if pair[0] == 0} == pairs
    assert {pair[1:] for pair in moved if pair[0] == 1} >= {(64, 32), (64, 8), (32, 8), (32, 1), (8, 1)}


def test_all_leave_at_one_exit_and_work_is_skipped() -> None:
    net = network(backbone=CountingNet())
    runner = compacting(net)
    for index in (0, 3, 1, 2):
        for samples in (64, 1, 17):
            with exits_at(net, index):
                net.backbone.runs.zero_()
                assert runner(images(samples)).exit_index.eq(index).all()
                torch.cuda.synchronize()
            assert net.backbone.runs.tolist()[: index + 1] == [1] * (index + 1)
            if samples > 1:  # the host has waited for the number
                assert net.backbone.runs.tolist() == [int(segment <= index) for segment in range(4)]


def test_a_steady_state_takes_no_memory_from_the_device() -> None:
    net = network()
    assert_takes_no_memory(compacting(net), [images(n) for n in (64, 40, 1, 12)])
