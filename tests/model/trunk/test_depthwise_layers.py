"""Depthwise convolutions of a backbone, with what follows them, as launches of Triton."""

import torch
import torch.nn.functional as F
from support.trunk_cases import assert_same, convolutions, made, with_odd_norms
from torch import Tensor, nn


class Depthwise(nn.Module):
    """Depthwise convolutions with what may follow them, and convolutions that are not quite that."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        followed = (nn.SiLU(), nn.Hardswish(), nn.ReLU6(), nn.ReLU(), nn.Identity())
        self.depthwise = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3, groups=4, padding=1), f) for f in followed))
        self.grouped = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.SiLU(), nn.Conv2d(4, 8, 3, groups=4), nn.SiLU())
        self.shared = nn.Conv2d(8, 8, 3, groups=8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.shared(self.grouped(self.depthwise(self.norm(x))))
        return (F.silu(y) + y).flatten(1)


def test_what_follows_a_depthwise_convolution_is_fused() -> None:
    backbone, x = with_odd_norms(Depthwise()), torch.randn(2, 4, 9, 9)
    trunk = made(backbone, [], x)
    found = [(conv.following, conv.in_triton) for conv in convolutions(trunk)]
    assert found == [
        ("silu", True), ("hardswish", True), ("relu6", True), ("relu", True), ("", True), ("silu", False),
        ("silu", False), ("", True),
    ]  # fmt: skip
    assert "Convolutions that run with what follows as one launch of Triton: 6." in trunk.notes
    for _ in range(2):
        assert_same(trunk, backbone, [], x)
        with torch.no_grad():
            backbone.depthwise[0][0].weight.mul_(2.0)
            backbone.depthwise[4][0].bias.add_(1.0)
        trunk.refresh()
