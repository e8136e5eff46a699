"""``attach``: where heads are placed, what they read, and models that have exits already."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from auxhead.model import accelerate, attach
from auxhead.model.attach import place_taps
from auxhead.model.listening.dry_run import Flow
from support.example_models import needs_gpu
from support.multi_exit_models import InAList
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("without_interpreter")  # answers are compared, not kernels

DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def of_torchvision(name: str, **options: Any) -> nn.Module:
    return getattr(torchvision.models, name)(num_classes=7, **options)


def of_timm(name: str, **options: Any) -> nn.Module:
    return pytest.importorskip("timm").create_model(name, num_classes=7, **options)


#: Where "auto" places heads, with pixels 224x224: behind stages or blocks, whatever the family.
PLACED: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "resnet18": (lambda: of_torchvision("resnet18"), ["layer1", "layer2", "layer3"]),
    "mobilenet_v3": (lambda: of_torchvision("mobilenet_v3_large"), ["features.4", "features.10", "features.12"]),
    "densenet": (lambda: of_torchvision("densenet121"), ["features.denseblock1", "features.transition2"]),
    "googlenet": (lambda: of_torchvision("googlenet", init_weights=False), ["maxpool2", "maxpool3", "inception4c"]),
    "convnext": (lambda: of_torchvision("convnext_tiny"), ["features.2", "features.5.2", "features.5"]),
    "vit": (lambda: of_torchvision("vit_b_16"), [f"encoder.layers.encoder_layer_{n}" for n in (2, 5, 8)]),
    "swin": (lambda: of_torchvision("swin_t"), ["features.2", "features.5.1", "features.5"]),
    "timm coatnet": (lambda: of_timm("coatnet_nano_rw_224"), None),
}


@pytest.mark.parametrize("name", PLACED)
def test_heads_are_placed_behind_blocks_of_the_main_path(name: str) -> None:
    make, expected = PLACED[name]
    with torch.device("meta"):
        model = make().train()
    x = torch.empty(2, 3, 224, 224, device="meta")
    flow = Flow(model, x)
    cuts = flow.cuts()
    work = dict(zip(cuts, flow.work_at(cuts), strict=True))
    placed = place_taps(cuts, work)
    assert expected is None or placed == expected
    shares = [work[tap] for tap in placed]
    assert len(placed) >= 2 and shares == sorted(shares)
    assert all(min(abs(share - target) for target in (0.25, 0.5, 0.75)) < 0.2 for share in shares)
    assert all(module.training for module in model.modules()) and not any(m._forward_hooks for m in model.modules())


#: Whole families with small inputs: the layout and pool of the heads.
SMALL: dict[str, tuple[Callable[[], nn.Module], int, str, str]] = {
    "resnet": (lambda: of_torchvision("resnet18"), 32, "NCHW", "avg"),
    "swin": (
        lambda: torchvision.models.SwinTransformer([4, 4], 24, [2, 2, 2], [2, 2, 2], [4, 4], num_classes=7),
        32,
        "NHWC",
        "avg",
    ),
    "vit": (lambda: torchvision.models.VisionTransformer(32, 16, 6, 2, 128, 512, num_classes=7), 32, "NTD", "first"),
    "timm vit by mean": (
        lambda: of_timm("vit_tiny_patch16_224", img_size=32, global_pool="avg"),
        32,
        "NTD",
        "avg",
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_heads_read_what_a_hook_and_a_pool_would(name: str) -> None:
    make, side, layout, pool = SMALL[name]
    model, x = make().eval(), torch.randn(2, 3, side, side)
    network = attach(model, example_input=x)
    assert network.backbone is model and not network.training
    assert {network.extract[tap].layout for tap in network.taps} == {layout}
    assert {head.pool for head in network.heads} == {pool}
    seen: dict[str, Tensor] = {}
    hooks = [
        model.get_submodule(tap).register_forward_hook(lambda _m, _x, y, tap=tap: seen.__setitem__(tap, y))
        for tap in network.taps
    ]
    with torch.no_grad():
        last = model(x)
        for hook in hooks:
            hook.remove()
        *logits, final = network.logits(x)
        assert torch.equal(final, last)
        for tap, head, got in zip(network.taps, network.heads, logits, strict=True):
            y = seen[tap]
            pooled = {
                "NCHW": lambda y=y: y.mean((2, 3)),
                "NHWC": lambda y=y: y.mean((1, 2)),
                "NTD": lambda y=y: y[:, 0] if pool == "first" else y.mean(1),
            }[layout]()
            torch.testing.assert_close(got, F.linear(pooled, head.linear.weight, head.linear.bias))
        assert network(x).label.tolist() == last.argmax(1).tolist()  # no head exits yet


class Bottle(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 1, 1))
        self.shortcut = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


class Residual(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.blocks = nn.Sequential(*(Bottle(8) for _ in range(blocks)))
        self.beside = nn.Linear(8, 8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(self.stem(x)).mean((2, 3))
        self.beside(y)  # of which nothing is used
        return self.fc(y)


class Skipped(Residual):
    """What the stem makes is used at the end, too."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return self.fc(self.blocks(y).mean((2, 3)) + y.mean((2, 3)))


class InPlace(Residual):
    """The second block's output is changed in place later."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[1](self.blocks[0](self.stem(x)))
        y = self.blocks[2](y.mul_(2.0))
        return self.fc(self.blocks[3](y).mean((2, 3)))


class Halved(Residual):
    """The last two blocks get half of the channels each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Bottle(8), Bottle(8), Bottle(4), Bottle(4))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks[1](self.blocks[0](self.stem(x))).chunk(2, 1)
        return self.fc(torch.cat([self.blocks[2](first), self.blocks[3](second)], 1).mean((2, 3)))


@pytest.mark.parametrize(
    ("model", "cuts"),
    [
        (Residual(), ["stem", "blocks.0", "blocks.1", "blocks.2", "blocks", "fc"]),
        (Skipped(), ["stem", "fc"]),
        (InPlace(), ["stem", "blocks.0", "blocks.2", "blocks.3", "fc"]),
        (Halved(), ["stem", "blocks.0", "blocks.1", "fc"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_cut_is_all_that_the_rest_of_the_model_sees(model: nn.Module, cuts: list[str]) -> None:
    x = torch.randn(2, 3, 8, 8)
    flow = Flow(model, x)
    # The model itself is the judge: with the output of a cut given, its answer does not depend on the input.
    assert flow.cuts() == cuts
    assert not any(differs_with_output_given(model, name, x) for name in cuts)
    others = [name for name, layer in model.named_modules() if name in flow.shapes and name and name not in cuts]
    same = [name for name in others if not differs_with_output_given(model, name, x)]
    # Unused, of the same tensor as the whole, or changed in place before it is read.
    assert set(same) <= {"beside", "blocks.3"} | ({"blocks.1"} if isinstance(model, InPlace) else set())


def differs_with_output_given(model: nn.Module, name: str, x: Tensor) -> bool:
    """Whether the model's answer depends on more of the input than goes through a layer."""
    kept: list[Tensor] = []
    layer = model.get_submodule(name)
    with torch.no_grad():
        hook = layer.register_forward_hook(lambda _m, _x, y: kept.append(y.clone()))
        before = model(x)
        hook.remove()
        hook = layer.register_forward_hook(lambda _m, _x, _y: kept[0].clone())
        after = model(torch.randn_like(x))
        hook.remove()
    return not torch.equal(before, after)


@pytest.mark.parametrize("device", DEVICES)
def test_shares_of_the_work_are_told(device: str) -> None:
    x = torch.randn(4, 3, 16, 16, device=device)
    model = Residual(8).to(device)
    network = attach(model, example_input=x)
    assert network.taps == ("blocks.1", "blocks.3", "blocks.5") or device == "cuda"
    assert list(network.shares) == list(network.taps) and sorted(network.shares.values()) == list(
        network.shares.values()
    )
    assert all(0.1 < share < 0.9 for share in network.shares.values())
    by_hand = attach(model, ["blocks.0", "blocks.6"], example_input=x)
    assert by_hand.taps == ("blocks.0", "blocks.6")
    first, last = by_hand.describe().splitlines()
    share = by_hand.shares["blocks.0"]
    assert first == f"blocks.0 [N, C, H, W]: pool 'avg', 5 classes, behind {share:.0%} of the work"
    assert by_hand.shares["blocks.6"] > 0.7 or device == "cuda"


def test_a_layer_of_a_branch_is_tapped_where_it_is_named() -> None:
    network = attach(Residual(), ["blocks.1.branch.0"], example_input=torch.randn(2, 3, 8, 8))
    assert network.heads[0].linear.in_features == 8


class Lines(nn.Module):
    """Lines of an image one after the other, read by an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(24, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x.permute(0, 2, 1, 3).flatten(2))[0][:, -1])


class Binary(Residual):
    """One logit of each sample, as BCEWithLogitsLoss reads it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 0]


def test_an_error_of_the_users_own_stays_in_sight() -> None:
    class OwnError(Exception):
        pass

    for kind in (OwnError, RuntimeError):
        model = Residual()
        model.blocks.register_forward_hook(lambda *_, kind=kind: (_ for _ in ()).throw(kind("mine")))
        with pytest.raises((ValueError, OwnError), match="mine") as raised:
            attach(model, example_input=torch.randn(2, 3, 8, 8))
        assert kind in (type(raised.value), type(raised.value.__cause__))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"taps": "layer1"}, ValueError, "taps: got 'layer1', wants 'auto' or a list"),
        ({"taps": [1]}, TypeError, r"taps: got \[1\], wants 'auto' or a list of names"),
        (
            {"taps": [("blocks.0", "blocks.1")]},
            TypeError,
            r"taps: .*; a head reads one layer: .* self.joined = nn.Ident",
        ),
        ({"taps": ["blocks.0", "blocks.0"]}, ValueError, "taps: got 'blocks.0' twice, wants each layer once"),
        ({"model": attach(Residual(), example_input=torch.randn(2, 3, 8, 8))}, TypeError, "model: got an EarlyExitNet"),
        ({"model": InAList(), "logits": "out"}, ValueError, "logits: of what .* returns: .*; wants logits=0"),
        ({"taps": ["blocks.9"]}, ValueError, "no layer 'blocks.9'; close to it: blocks"),
        ({"taps": []}, ValueError, "taps: got none"),
        ({"example_input": None}, TypeError, "example_input: got NoneType"),
        ({"model": "resnet18"}, TypeError, "model: got str, wants an nn.Module"),
        ({"model": torch.compile(Residual())}, ValueError, r"model: is a compiled Residual, .*, model\._orig_mod$"),
        ({"model": Skipped()}, ValueError, "taps: 'auto' finds no layer"),  # it has no main path
        ({"model": Lines()}, ValueError, "taps: 'auto' finds no layer .*; wants names of layers; .*: lstm, fc$"),
        ({"model": Binary()}, ValueError, "model: got one logit, .*zeros_like.*; labels are 0 and 1, int64$"),
        (
            {"example_input": torch.randn(3, 8, 8)},
            ValueError,
            r"\(two samples \[2, 8, 8\] of torch.float32\): .*; wants",
        ),
        ({"example_input": torch.zeros(2, 3, 8, 8).byte()}, ValueError, r"^example_input: .* torch.uint8\)"),
        ({"model": nn.Conv2d(3, 5, 1)}, ValueError, r"model: returned a tensor \[2, 5, 8, 8\].*wants logits"),
    ],
)
def test_what_does_not_fit_is_refused(options: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        attach(**{"model": Residual(), "example_input": torch.randn(2, 3, 8, 8)} | options)


@pytest.mark.parametrize("taps", ["auto", ["blocks.0", "blocks.1"]])
def test_a_model_that_returns_a_list_of_logits_keeps_its_heads(taps: Any) -> None:
    model, x = InAList().eval(), torch.randn(3, 3, 16, 16)
    if taps == "auto":
        network = attach(model, taps, example_input=x)
        torch.testing.assert_close(network.logits(x), [*model(x)])
        assert network.heads[0].linear.weight is model.exits[0][2].weight
        with pytest.raises(TypeError, match="example: got tuple"):  # whose heads take one tensor
            attach(model, taps, example_input=(x,))
    else:
        network = attach(model, taps, example_input=x, logits=-1)
        torch.testing.assert_close(network.logits(x)[-1], model(x)[-1])
        assert network.heads[0].linear.weight is not model.exits[0][2].weight


class Tokens(nn.Module):
    """A class token that sees the image in the first block, and work before that."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
        self.cls, self.at = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 17, 16))
        self.drop, self.norm = nn.Dropout(0.1), nn.LayerNorm(16)
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)))
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = self.norm(self.drop(torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.at))
        return self.fc(self.blocks(x)[:, 0])


def test_no_head_reads_a_token_that_no_image_has_reached() -> None:
    model, x = Tokens().eval(), torch.randn(4, 3, 16, 16)
    network = attach(model, example_input=x)
    assert network.taps and not {"drop", "norm"} & set(network.taps)
    assert all(not torch.equal(logits[0], logits[1]) for logits in network.logits(x))
    for tap in ("drop", "norm"):
        with pytest.raises(ValueError, match=f"taps: the first token behind '{tap}'.* is the same for all samples"):
            attach(model, [tap], example_input=x)


def test_shares_that_no_layer_has_are_told() -> None:
    network = attach(
        nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 5)), example_input=torch.randn(2, 4)
    )
    assert "no layer that may carry a head is near" in network.describe().splitlines()[-1]


def test_a_model_without_exits_runs_once_and_is_told_so_at_once() -> None:
    model, x, runs = Residual().eval(), torch.randn(2, 3, 8, 8), []
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    attach(model, example_input=x)
    assert len(runs) == 1
    with pytest.raises(ValueError, match="in which 1 exit can be told, wants .*; heads for .* are those of attach$"):
        accelerate(model, x)
    assert len(runs) == 3


class InTurn(nn.Module):
    """Calls torch's attention on the tokens, by itself or in PyTorch's layer."""

    def __init__(self):
        super().__init__()
        self.first, self.attention, self.last = (
            nn.Linear(16, 16),
            nn.MultiheadAttention(16, 2, batch_first=True),
            nn.Mish(),
        )

    def forward(self, x):
        x = self.first(x)
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.last(nn.functional.scaled_dot_product_attention(x, x, x)).mean(1)


def test_flops_are_those_of_products_and_convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.Flatten(), nn.Linear(128, 10)
    ).train()  # 2 * 64 * (27 * 4) = 13,824, 2 * 64 * (4 * 2) = 1,024, 2 * 1,280 = 2,560
    shares = Flow(model, torch.randn(5, 3, 8, 8)).work_at(["0", "1", "2", "3", "4"])
    assert shares == [13_824 / 17_408, 13_824 / 17_408, 14_848 / 17_408, 14_848 / 17_408, 1.0]
    assert all(module.training for module in model.modules()) and not any(m._forward_hooks for m in model.modules())


def test_attention_is_counted_however_and_wherever_it_is_computed(device):
    # a token: projections in and out of 16 * 48 and 16 * 16, and scores and values of 2 * 16 * 6 tokens, twice
    layers, tokens = ["first", "attention"], torch.randn(3, 6, 16)
    products = [16 * 16, 16 * 48 + 2 * 16 * 6 + 16 * 16, 2 * 16 * 6]
    wanted = [products[0] / sum(products), sum(products[:2]) / sum(products)]
    model = InTurn()
    assert Flow(model, tokens).work_at(layers) == wanted
    assert Flow(copy.deepcopy(model).bfloat16(), tokens.bfloat16()).work_at(layers) == wanted
    assert Flow(copy.deepcopy(model).to("meta"), tokens.to("meta")).work_at(layers) == wanted
    assert Flow(copy.deepcopy(model).to(device), tokens.to(device)).work_at(layers) == wanted
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert Flow(model, tokens).work_at(layers) == wanted


class SharedKeys(nn.Module):
    """Four heads of queries, of which two each share keys and values."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32)

    def forward(self, x):
        query = self.first(x).unflatten(2, (4, 8)).transpose(1, 2)
        key = query[:, ::2]
        return nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_heads_that_share_keys_are_counted(where):
    products = [32 * 32, 2 * 32 * 6]
    model = SharedKeys().to(where)
    assert Flow(model, torch.empty(2, 6, 32, device=where)).work_at(["first"]) == [products[0] / sum(products)]


def test_compiled_layers_are_counted():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 4))
    plain = Flow(model, torch.randn(2, 4)).work_at(["0", "1"])
    assert plain == [16 / 80, 48 / 80]
    model[1].compile(fullgraph=True)
    assert Flow(model, torch.randn(2, 4)).work_at(["0", "1"]) == plain
    model.compile()
    assert Flow(model, torch.randn(2, 4)).work_at(["0", "1"]) == plain


def test_of_a_model_without_products_operators_count():
    model = nn.Sequential(nn.ReLU(), nn.Sigmoid(), nn.Flatten(), nn.Softplus())
    assert Flow(model, torch.randn(2, 4)).work_at(["0", "1", "2"]) == pytest.approx([1 / 3, 2 / 3, 2 / 3])


def test_a_batch_that_the_model_changes_is_left_as_it_is():
    x = torch.randn(2, 4)
    before = x.clone()
    Flow(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), x).work_at(["0"])
    assert torch.equal(x, before)


def test_of_layers_behind_the_same_work_the_last_gets_the_head():
    work = {"conv": 0.25, "relu": 0.25, "pool": 0.25, "second": 0.6, "third": 1.0}
    assert place_taps(list(work), work) == ["pool", "second"]
