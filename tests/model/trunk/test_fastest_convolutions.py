"""cuDNN times its algorithms for large batches alone, and nobody else's setting is touched."""

import pytest
import torch
from auxhead.model.trunk.fused_convolution import LEAST_TIMED_BATCH, fastest_convolutions
from auxhead.model.trunk.trunk import make_trunk
from support.example_models import SmallNet
from torch import nn

cudnn = torch.backends.cudnn


@pytest.mark.parametrize("before", [False, True])
def test_large_batches_are_timed_and_small_ones_left_to_the_user(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "benchmark", before)
    with fastest_convolutions(LEAST_TIMED_BATCH):
        assert cudnn.benchmark
    with fastest_convolutions(LEAST_TIMED_BATCH - 1):
        assert cudnn.benchmark is before
    with pytest.raises(KeyError), fastest_convolutions(LEAST_TIMED_BATCH):
        raise KeyError
    assert cudnn.benchmark is before


def test_nothing_is_timed_where_results_must_be_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "deterministic", True)
    with fastest_convolutions(64):
        assert not cudnn.benchmark
    monkeypatch.setattr(cudnn, "deterministic", False)
    torch.use_deterministic_algorithms(True)
    try:
        with fastest_convolutions(64):
            assert not cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(False)


class Told(nn.Module):
    """Notes whether cuDNN would time its algorithms while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(cudnn.benchmark)
        return x


@pytest.mark.parametrize("kind", ["as_is", "cudnn"])
@pytest.mark.parametrize("samples", [2, LEAST_TIMED_BATCH])
def test_a_trunk_is_made_and_run_with_the_fastest(kind: str, samples: int) -> None:
    told = Told()
    backbone = nn.Sequential(told, SmallNet()).eval()
    taps = [f"1.{tap}" for tap in SmallNet.taps]
    x = torch.randn(samples, 3, 16, 16)
    trunk = make_trunk(backbone, taps, x, kind)
    timed = kind == "cudnn" and samples >= LEAST_TIMED_BATCH
    assert (True in told.seen) == timed
    with trunk.choosing(samples):
        assert cudnn.benchmark == timed
    assert not cudnn.benchmark
