"""The first convolution of three channels, which graphs in half precision read in four."""

import copy
from typing import Any

import pytest
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead, Trunk, make_runner, make_trunk
from support.trunk_cases import logits
from torch import Tensor, nn


class Stem(nn.Module):
    """Its first convolution has three channels, a batch norm and a ReLU."""

    taps = ("rest",)

    def __init__(self, reads_twice: bool = False, channels: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.rest = nn.Conv2d(8, 8, 3)
        self.fc = nn.Linear(8, 5)
        self.reads_twice = reads_twice

    def forward(self, x: Tensor) -> Tensor:
        y = self.rest(self.stem(x)).mean((2, 3))
        return self.fc(y + x.mean() if self.reads_twice else y)


def of_stem(dtype: torch.dtype = torch.float16, **options: Any) -> tuple[Stem, Trunk, Tensor]:
    torch.manual_seed(0)
    backbone = Stem(**options).eval().to(dtype)
    x = torch.randn(2, options.get("channels", 3), 12, 12, dtype=dtype)
    return backbone, make_trunk(backbone, Stem.taps, x, "cudnn"), x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_graphs_read_three_channels_of_half_precision_in_four(dtype: torch.dtype) -> None:
    backbone, trunk, x = of_stem(dtype)
    assert trunk.channels == 4 and "Graphs read batches in 4 channels" in " ".join(trunk.notes)
    read = trunk.memory_for(x)
    assert read.shape == (2, 4, 12, 12) and read.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(read[:, :3], x) and not read[:, 3].any()
    for given in (read, x):
        torch.testing.assert_close(logits(trunk, given), backbone(x), atol=0.02, rtol=0.02)


class TwoStreams(nn.Module):
    """Two convolutions read the input, or one of them what is made of it."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.one, self.two = (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(2))
        self.fc, self.scaled = nn.Linear(16, 5), scaled

    def forward(self, x: Tensor) -> Tensor:
        other = x * 2.0 if self.scaled else x
        return self.fc(torch.cat([self.one(x), self.two(other)], 1).mean((2, 3)))


@pytest.mark.parametrize("kind", ["cudnn", "branched"])
def test_several_first_convolutions_read_four_channels(kind: str) -> None:
    backbone = TwoStreams(scaled=False).eval().half()
    x = torch.randn(2, 3, 12, 12, dtype=torch.float16)
    trunk = make_trunk(backbone, (), x, kind)
    assert trunk.channels == 4
    for _ in range(2):
        for given in (trunk.memory_for(x), x):
            torch.testing.assert_close(logits(trunk, given), backbone(x), atol=0.02, rtol=0.02)
        with torch.no_grad():
            backbone.two[0].weight.mul_(2.0)
        trunk.refresh()
    assert make_trunk(TwoStreams(scaled=True).eval().half(), (), x, kind).channels is None


@pytest.mark.parametrize(
    "options", [{"dtype": torch.float32}, {"reads_twice": True}, {"channels": 1}, {"channels": 4}], ids=str
)
def test_all_others_are_read_as_they_are(options: dict[str, Any]) -> None:
    backbone, trunk, x = of_stem(**options)
    assert trunk.channels is None and "channels, which" not in " ".join(trunk.notes)
    read = trunk.memory_for(x)
    assert torch.equal(read, x) and read.data_ptr() != x.data_ptr()
    torch.testing.assert_close(logits(trunk, read), backbone(x), atol=0.02, rtol=0.02)


def test_the_weight_for_four_channels_is_brought_up_to_date() -> None:
    backbone, trunk, x = of_stem()
    before = logits(trunk, trunk.memory_for(x))
    with torch.no_grad():
        backbone.stem[0].weight.mul_(3.0)
        backbone.stem[1].running_mean.add_(0.2)
    trunk.refresh()
    after = logits(trunk, trunk.memory_for(x))
    torch.testing.assert_close(after, backbone(x), atol=0.02, rtol=0.02)
    assert not torch.allclose(before, after, atol=0.02)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_weight_that_is_the_users_own_is_copied_for_four_channels(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    backbone, x = backbone.eval().half().to(memory_format=layout), torch.randn(2, 3, 9, 9, dtype=torch.float16)
    trunk = make_trunk(backbone, ("1",), x, "cudnn")
    with torch.no_grad():
        backbone[0].weight.mul_(2.0)
    trunk.refresh()
    assert not any(one.requires_grad for one in trunk.module.buffers()), "a refresh is no step of a computation"
    with torch.no_grad():
        found, wanted = logits(trunk, trunk.memory_for(x)), backbone(x)
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.02)
    copy.deepcopy(trunk)


def test_an_eager_runner_takes_pictures_of_as_many_channels_as_the_backbone() -> None:
    backbone, _, x = of_stem()
    network = EarlyExitNetwork(backbone, {"rest": FusedAuxHead(8, 5).half()}, example_input=x).eval()
    runner = make_runner(network, x, exits="eager", trunk="cudnn")
    runner(x)
    with pytest.raises(ValueError, match="x: got 4 channels, wants as many as the backbone takes"):
        runner(torch.randn(2, 4, 12, 12, dtype=torch.float16))
