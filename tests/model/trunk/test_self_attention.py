"""Self-attentions of a backbone, which trunks run without copies of queries, keys and values."""

import pytest
import torch
from auxhead.model.trunk.self_attention import SelfAttention
from support.trunk_cases import assert_same, made
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Tokens that attend to each other, and a classifier."""

    taps = ("norm",)

    def __init__(self, attention: nn.Module, **options: object) -> None:
        super().__init__()
        self.norm, self.attention, self.fc = nn.LayerNorm(12), attention, nn.Linear(12, 5)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        y, _ = self.attention(x, x, x, **self.options)
        return self.fc((x + y).mean(1))


def attentions(trunk) -> int:
    return sum(isinstance(layer, SelfAttention) for layer in trunk.module.modules())


@pytest.mark.parametrize("kind", ["cudnn", "inductor"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_attends_as_pytorch_does(kind, batch_first, bias, monkeypatch) -> None:
    monkeypatch.setattr("torch._inductor.compile", lambda graph, _inputs, options: graph)
    attention = nn.MultiheadAttention(12, 3, bias=bias, batch_first=batch_first)
    backbone, x = Block(attention, need_weights=False).eval(), torch.randn(2, 7, 12)
    trunk = made(backbone, Block.taps, x, kind)
    assert attentions(trunk) == 1 and "Attending without copies: 1 self-attention." in trunk.notes
    assert_same(trunk, backbone, Block.taps, x)
    with torch.no_grad():
        backbone.attention.in_proj_weight.mul_(2.0)
    assert_same(trunk, backbone, Block.taps, x)


class Weighing(Block):
    """It uses the weights of its attention, too."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        y, weights = self.attention(x, x, x)
        return self.fc(y.mean(1)) + weights.mean()


def plain() -> nn.MultiheadAttention:
    return nn.MultiheadAttention(12, 3, batch_first=True)


@pytest.mark.parametrize(
    "backbone",
    [
        Block(plain(), attn_mask=torch.ones(7, 7).triu(1).bool()),
        Block(nn.MultiheadAttention(12, 3, batch_first=True, add_bias_kv=True)),
        Block(nn.MultiheadAttention(12, 3, batch_first=True, add_zero_attn=True)),
        Weighing(plain()),
    ],
    ids=["masked", "with biases", "with zeros", "weights wanted"],
)
def test_all_others_are_pytorchs(backbone) -> None:
    x = torch.randn(2, 7, 12)
    trunk = made(backbone.eval(), Block.taps, x, "cudnn")
    assert attentions(trunk) == 0
    assert_same(trunk, backbone, Block.taps, x)


def test_hooks_keep_an_attention_as_it_is() -> None:
    backbone, x = Block(plain()).eval(), torch.randn(2, 7, 12)
    backbone.attention.register_forward_hook(lambda _layer, _inputs, output: (2 * output[0], output[1]))
    trunk = made(backbone, Block.taps, x, "cudnn")
    assert attentions(trunk) == 0
    assert_same(trunk, backbone, Block.taps, x)


class Spelled(nn.Module):
    """Attends by PyTorch's function, as timm's blocks do."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.qkv, self.fc, self.options = nn.Linear(12, 36), nn.Linear(12, 5), options

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).reshape(x.shape[0], -1, 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(query, key, value, **self.options)
        return self.fc((x + y.transpose(1, 2).reshape(x.shape)).mean(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["cudnn", "inductor"])
def test_attends_by_one_launch_where_code_spells_it_out(kind, dtype, device, monkeypatch) -> None:
    compiled = []
    compiler = torch._inductor.compile
    launched = (dtype is torch.float16) and (device.type == "cuda" or not torch.cuda.is_available())

    def noted(graph, inputs, options):
        compiled.append(graph)
        return compiler(graph, inputs, options=options) if device.type == "cuda" else graph

    monkeypatch.setattr("torch._inductor.compile", noted)
    backbone = Spelled(dropout_p=0.0, is_causal=False).to(device, dtype).eval()
    x = torch.randn(2, 7, 12, device=device, dtype=dtype)
    trunk = made(backbone, ["qkv"], x, kind)
    assert "Attending without copies: 1 self-attention." in trunk.notes
    called = [node.target for graph in compiled for node in graph.graph.nodes]
    assert kind == "cudnn" or (torch.ops.auxhead.attention.default in called) == launched
    for samples in (2, 3):
        assert_same(trunk, backbone, ["qkv"], torch.randn(samples, 7, 12, device=device, dtype=dtype))


@pytest.mark.parametrize(
    "options",
    [{"is_causal": True}, {"scale": 1.0}, {"attn_mask": torch.ones(7, 7).triu(1)}],
    ids=lambda one: next(iter(one)),
)
def test_what_code_says_of_its_attention_counts(options) -> None:
    backbone, x = Spelled(**options).eval(), torch.randn(2, 7, 12)
    trunk = made(backbone, ["qkv"], x)
    assert not any("Attending" in note for note in trunk.notes)
    assert_same(trunk, backbone, ["qkv"], x)


@pytest.mark.parametrize(("height", "samples"), [(24, 1), (28, 2), (12, 3)])
@pytest.mark.parametrize("kind", ["cudnn", "inductor"])
def test_attends_within_windows_as_torchvision_does(kind, height, samples, monkeypatch) -> None:
    """Shifted or not, where windows fit and where they do not, and where one is the whole map."""
    swin = pytest.importorskip("torchvision.models.swin_transformer")
    monkeypatch.setattr("torch._inductor.compile", lambda graph, _inputs, options: graph)
    sizes = {"patch_size": [2, 2], "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": [3, 4]}
    backbone = swin.SwinTransformer(**sizes, num_classes=5).eval()
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if "bias" in name:
                parameter.normal_()
    taps, x = ("features.1",), torch.randn(samples, 3, height, 30)
    trunk = made(backbone, taps, x, kind)
    assert "Attending without copies: 4 self-attentions." in trunk.notes
    assert_same(trunk, backbone, taps, x)


def test_other_attentions_within_windows_are_torchvisions() -> None:
    swin = pytest.importorskip("torchvision.models.swin_transformer")
    sizes = {"patch_size": [2, 2], "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": [3, 3]}
    x = torch.randn(1, 3, 12, 12)
    second = swin.SwinTransformer(**sizes, num_classes=5, block=swin.SwinTransformerBlockV2).eval()
    trunk = made(second, ("features.1",), x)
    assert not any("Attending" in note for note in trunk.notes)
    assert_same(trunk, second, ("features.1",), x)
