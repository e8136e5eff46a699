"""What heads read of their taps: layouts, items and functions; and which part of a backbone's output is its logits."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torchvision
from auxhead.model import (
    EarlyExitNetwork,
    Extract,
    FusedAuxHead,
    attach,
    load_checkpoint,
    make_runner,
    save_checkpoint,
)
from auxhead.model.basics.bad_input import BadInput
from support.example_models import needs_gpu
from torch import Tensor, nn

K = 5
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


class Stage(nn.Module):
    """Maps [N, C, H, W] to maps in one layout; ``act`` alone says nothing of its order."""

    def __init__(self, channels: int, width: int, layout: str) -> None:
        super().__init__()
        self.conv, self.layout = nn.Conv2d(channels, width, 3, 2, 1), layout

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return F.gelu(y.permute(0, 2, 3, 1)) if self.layout == "NHWC" else F.gelu(y)


class Mixed(nn.Module):
    """Returns maps, then tokens, in the layouts that it is made with; logits in whatever ``wrap`` makes of them."""

    taps = ("stage", "tokens")

    def __init__(self, maps: str = "NHWC", tokens: str = "NCL", wrap: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.stage, self.mix, self.tokens = Stage(3, 6, maps), nn.Conv1d(6, 8, 3, padding=1), nn.Identity()
        self.fc, self.layouts, self.wrap = nn.Linear(8, K), (maps, tokens), wrap

    def forward(self, x: Tensor) -> Any:
        y = self.stage(x)
        y = y.permute(0, 3, 1, 2) if self.layouts[0] == "NHWC" else y
        y = self.mix(y.flatten(2))
        y = self.tokens({"NCL": y, "NTD": y.transpose(1, 2), "TND": y.permute(2, 0, 1)}[self.layouts[1]])
        y = {"NCL": y, "NTD": y.transpose(1, 2), "TND": y.permute(1, 2, 0)}[self.layouts[1]]
        return self.wrap(self.fc(y.mean(2)))


def images(samples: int = 3) -> Tensor:
    return torch.randn(samples, 3, 16, 16)


def wanted(network: EarlyExitNetwork, x: Tensor) -> list[Tensor]:
    """The logits of heads at the taps of :class:`Mixed`, by hand."""
    backbone, (first, second) = network.backbone, network.heads
    y = F.gelu(backbone.stage.conv(x))
    z = backbone.mix(y.flatten(2))
    return [first.linear(y.mean((2, 3))), second.linear(z.mean(2)), backbone.fc(z.mean(2))]


def network_of(backbone: nn.Module, example: Tensor, **options: Any) -> EarlyExitNetwork:
    heads = {tap: FusedAuxHead(None, K) for tap in Mixed.taps}
    return EarlyExitNetwork(backbone, heads, 0.3, example_input=example, **options).eval()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("maps", "tokens"), [("NCHW", "NTD"), ("NHWC", "NCL")])
def test_layouts_are_inferred(maps: str, tokens: str, device: str) -> None:
    x = images().to(device)
    network = network_of(Mixed(maps, tokens).to(device), x)
    assert [network.extract[tap].layout for tap in network.taps] == [maps, tokens]
    torch.testing.assert_close(network.logits(x), [*wanted(network, x)])
    assert network.describe().splitlines()[1] == (
        f"tokens [{', '.join(tokens)}]: pool 'avg', 5 classes, over all tokens, padding included"
    )
    with torch.no_grad():
        answer, logits = network(x), torch.stack(wanted(network, x))
    exits = (logits.softmax(2).amax(2) > 0.3).to(torch.int8).tolist()
    first = [next((place for place in range(2) if exits[place][sample]), 2) for sample in range(len(x))]
    assert answer.exit_index.tolist() == first
    assert answer.label.tolist() == [int(logits[place, sample].argmax()) for sample, place in enumerate(first)]


@pytest.mark.parametrize("device", DEVICES)
def test_every_runner_reads_what_the_network_reads(device: str) -> None:
    x = images(4).to(device)
    backbone = Mixed(wrap=lambda y: {"loss": None, "logits": y}).to(device)
    network = network_of(backbone, x, extract={"tokens": lambda y: y.transpose(1, 2)})
    said = [confidence for head in network.logits(x)[:-1] for confidence in head.softmax(1).amax(1).tolist()]
    ordered = sorted(said)
    apart = max(range(1, len(ordered)), key=lambda place: ordered[place] - ordered[place - 1])
    network.set_rules((ordered[apart - 1] + ordered[apart]) / 2)  # which rounding on a GPU moves nobody over
    truth = network(x)
    for exits in ("eager", *(("overlapped", "polled", "gated") if device == "cuda" else ())):
        for trunk in ("as_is", "cudnn"):
            with make_runner(network, x, exits=exits, trunk=trunk) as runner:
                answer = runner(x)
            assert torch.equal(answer.label, truth.label) and torch.equal(answer.exit_index, truth.exit_index)
            torch.testing.assert_close(answer.confidence, truth.confidence)


def test_a_compiled_network_reads_the_same() -> None:
    x = images()
    backbone, extract = Mixed(wrap=lambda y: {"scores": y, "mean": x.mean()}), {"stage": Extract(layout="NHWC")}
    network = network_of(backbone, x, logits="scores", extract=extract)
    said, logits = torch.compile(lambda x: (network(x), network.logits(x)), fullgraph=True, backend="eager")(x)
    torch.testing.assert_close([*said], [*network(x)])
    torch.testing.assert_close([*logits], [*wanted(network, x)])


def test_tokens_before_samples_are_read_where_that_is_said() -> None:
    x = images()
    with pytest.raises(ValueError, match=r"heads: layer 'tokens' returns a tensor \[64, 2, 8\].*as many samples"):
        network_of(Mixed(tokens="TND"), x)
    network = network_of(Mixed(tokens="TND"), x, extract={"tokens": Extract(layout="TND")})
    torch.testing.assert_close(network.logits(x)[1], wanted(network, x)[1])


class Opaque(nn.Module):
    """Products that take no dimension for the channels more than another, before and behind its layer."""

    def __init__(self, ways: str) -> None:
        super().__init__()
        self.layer, self.weight, self.ways = nn.Identity(), nn.Parameter(torch.randn(K, 3, 6, 6)), ways

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.sin())
        if self.ways == "both":
            y = F.layer_norm(y, (6,)) + F.conv2d(y, torch.eye(3)[..., None, None])
        return (y[:, None] * self.weight).flatten(2).sum(2)


@pytest.mark.parametrize(("ways", "why"), [("none", "no operator that makes or reads it tells"), ("both", "disagree")])
def test_a_layout_that_nothing_tells_is_refused_with_what_to_write(ways: str, why: str) -> None:
    x = torch.randn(2, 3, 6, 6)
    say = rf"heads\['layer'\]: reads \[2, 3, 6, 6\].*{why}.*extract=\{{'layer': Extract\(layout='NCHW'\)\}}, or 'NHWC'"
    with pytest.raises(ValueError, match=say):
        EarlyExitNetwork(Opaque(ways), {"layer": FusedAuxHead(None, K)}, example_input=x)
    for layout, width in (("NCHW", 3), ("NHWC", 6)):
        extract = {"layer": Extract(layout=layout)}
        network = EarlyExitNetwork(Opaque(ways), {"layer": FusedAuxHead(None, K)}, example_input=x, extract=extract)
        assert network.heads[0].linear.in_features == width


def test_a_width_that_one_layout_alone_has_tells_it() -> None:
    for width, layout in ((3, "NCHW"), (6, "NHWC")):
        network = EarlyExitNetwork(
            Opaque("none"), {"layer": FusedAuxHead(width, K)}, example_input=torch.randn(2, 3, 6, 6)
        )
        assert network.extract["layer"].layout == layout


class Pair(nn.Module):
    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.pack = nn.Conv2d(3, 6, 3, 2, 1), pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(x, self.conv(x))


class PairNet(nn.Module):
    def __init__(self, pack: Callable[[Tensor, Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.pair, self.fc, self.unpack = Pair(pack), nn.Linear(6, K), unpack

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.unpack(self.pair(x)).mean((2, 3)))


class Named(NamedTuple):
    given: Tensor
    made: Tensor


@pytest.mark.parametrize(
    ("pack", "item"),
    [
        (lambda x, y: (x, y), 1),
        (lambda x, y: [x, y], -1),
        (lambda x, y: {"given": x, "made": y}, "made"),
        (Named, "made"),
        (lambda x, y: (x, y), lambda pair: pair[1]),
    ],
    ids="tuple list dict named function".split(),
)
def test_an_item_is_read_and_kept(pack: Any, item: Any, tmp_path: Any) -> None:
    x = images()
    extract = {"pair": item if callable(item) else Extract(item=item)}
    backbone = PairNet(pack, item if callable(item) else Extract(item=item))
    with pytest.raises(ValueError, match="layer 'pair' returns a .* of "):
        EarlyExitNetwork(backbone, {"pair": FusedAuxHead(None, K)}, example_input=x)
    network = EarlyExitNetwork(backbone, {"pair": FusedAuxHead(None, K)}, example_input=x, extract=extract).eval()
    torch.testing.assert_close(network.logits(x)[0], network.heads[0].linear(backbone.pair.conv(x).mean((2, 3))))
    save_checkpoint(tmp_path, network)
    if callable(item):
        with pytest.raises(BadInput, match=r"'pair'.*function of yours, which cannot be saved.*extract=\{'pair': func"):
            load_checkpoint(tmp_path, copy.deepcopy(backbone))
        loaded = load_checkpoint(tmp_path, copy.deepcopy(backbone), extract={"pair": item}).network
    else:
        with pytest.raises(BadInput, match="has no function at 'pair'"):
            load_checkpoint(tmp_path, copy.deepcopy(backbone), extract={"pair": lambda y: y})
        loaded = load_checkpoint(tmp_path, copy.deepcopy(backbone)).network
        assert loaded.extract["pair"] == Extract(item, "NCHW", mask=None)  # which maps have none of
    assert torch.equal(loaded(x).label, network(x).label)
    assert torch.equal(loaded.logits(x)[0], network.logits(x)[0])


@pytest.mark.parametrize(
    ("extract", "error", "match"),
    [
        ({"pair": Extract(item=2)}, ValueError, r"extract\['pair'\]: .*a tuple of 2, which has no 2"),
        ({"pair": Extract(item="made")}, ValueError, r"extract\['pair'\]: .*a tuple of 2, which has no 'made'"),
        ({"pair": Extract(item=1, layout="NCL")}, ValueError, r"extract\['pair'\]: .*rank 3 for layout='NCL'"),
        ({"pair": lambda pair: pair.made}, ValueError, r"extract\['pair'\]: .*has no attribute 'made'"),
        ({"pair": lambda pair: pair[1].int()}, ValueError, "torch.int32, which a head cannot read"),
        ({"elsewhere": Extract(item=1)}, ValueError, r"extract: 'elsewhere' is not a tap, wants one of \['pair'\]"),
        ({"pair": 1}, TypeError, r"extract\['pair'\]: got int, wants an Extract or a function"),
        ([Extract(item=1)], TypeError, "extract: got list, wants a dict"),
    ],
)
def test_extracts_that_do_not_fit(extract: Any, error: type[Exception], match: str) -> None:
    backbone = PairNet(lambda x, y: (x, y), lambda pair: pair[1])
    with pytest.raises(error, match=match):
        EarlyExitNetwork(backbone, {"pair": FusedAuxHead(None, K)}, example_input=images(), extract=extract)


def test_an_item_that_the_backbone_takes_out_of_a_dict_is_read() -> None:
    backbone = PairNet(lambda x, y: {"given": x, "made": y}, lambda pair: pair.pop("made"))
    extract = {"pair": Extract(item="made")}
    network = EarlyExitNetwork(backbone, {"pair": FusedAuxHead(None, K)}, example_input=images(), extract=extract)
    assert network.heads[0].in_features == 6


def test_of_an_lstm_item_and_layout_are_told_at_once() -> None:
    class Lines(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.fc = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, K)
            self.next = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.next(self.lstm(x)[0])[0][:, -1])

    x, heads = torch.randn(2, 5, 6), {"lstm": FusedAuxHead(None, K)}
    with pytest.raises(ValueError, match=r"extract=\{'lstm': Extract\(item=0, layout='NTD'\)\}, or 'NCL'"):
        EarlyExitNetwork(Lines(), heads, example_input=x)
    network = EarlyExitNetwork(Lines(), heads, example_input=x, extract={"lstm": Extract(item=0, layout="NTD")})
    assert network.heads[0].in_features == 8


def test_fields_of_an_extract_are_checked() -> None:
    with pytest.raises(ValueError, match=r"layout: got 'HWCN', wants one of \['NCHW'"):
        Extract(layout="HWCN")
    with pytest.raises(TypeError, match="item: got bool, wants an index, a key or None"):
        Extract(item=True)


class Output(NamedTuple):
    hidden: Tensor
    logits: Tensor


@pytest.mark.parametrize(
    ("wrap", "part"),
    [
        (lambda y: Output(y.sum(), y), None),
        (lambda y: {"hidden": y.sum(), "logits": y}, None),
        (lambda y: (y.sum(), y), 1),
        (lambda y: {"out": y}, "out"),
    ],
    ids="field key index named".split(),
)
def test_logits_are_found_in_what_a_backbone_returns(wrap: Any, part: Any, tmp_path: Any) -> None:
    x = images()
    network = network_of(Mixed(wrap=wrap), x, logits=part)
    torch.testing.assert_close(network.logits(x)[2], wanted(network, x)[2])
    save_checkpoint(tmp_path, network)
    loaded = load_checkpoint(tmp_path, Mixed(wrap=wrap)).network
    assert torch.equal(loaded(x).label, network(x).label)
    assert not network.backbone._forward_hooks
    network.train()
    torch.stack(network.logits(x)).sum().backward()
    assert network.backbone.fc.weight.grad is not None


def test_an_output_without_logits_is_refused_with_what_to_write() -> None:
    with pytest.raises(ValueError, match="got an OrderedDict of y, out, which has no 'logits'; wants logits='out'$"):
        attach(Mixed(wrap=lambda y: OrderedDict(y=None, out=y)), example_input=images())
    with pytest.raises(
        ValueError, match=r"backbone: returned a tuple of 2, wants logits.*name it: logits=0, or logits=1"
    ):
        network_of(Mixed(wrap=lambda y: (y, y)), images())
    with pytest.raises(ValueError, match="logits: of what the backbone returns: got a tuple of 1, which has no 3"):
        network_of(Mixed(wrap=lambda y: (y,)), images(), logits=3)
    with pytest.raises(TypeError, match="logits: got float, wants an index, a key or None"):
        network_of(Mixed(), images(), logits=0.5)


def test_googlenet_trains_with_its_auxiliary_logits() -> None:
    backbone = torchvision.models.googlenet(num_classes=K, init_weights=False, aux_logits=True)
    x = torch.randn(2, 3, 64, 64)
    network = EarlyExitNetwork(backbone, {"inception3a": FusedAuxHead(None, K)}, example_input=x)
    network.train()
    assert type(backbone(x)) is not Tensor
    logits = network.logits(x)
    assert [tuple(y.shape) for y in logits] == [(2, K), (2, K)]
    torch.stack(logits).logsumexp(2).sum().backward()
    assert backbone.fc.weight.grad is not None and network.heads[0].linear.weight.grad is not None
    assert network(x).label.shape == (2,)


class Two(nn.Module):
    """A backbone of two tensors and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.stage, self.fc = nn.Conv2d(3, 6, 3), nn.Linear(6, K)

    def forward(self, x: Tensor, scale: Tensor, *, shift: float = 0.0) -> Tensor:
        return self.fc((self.stage(x) * scale[:, None, None, None] + shift).mean((2, 3)))


@pytest.mark.parametrize("named", [False, True])
def test_a_backbone_of_several_arguments_answers_eagerly(named: bool) -> None:
    x, scale = images(), torch.rand(3)
    batch = {"x": x, "scale": scale, "shift": 0.5} if named else (x, scale)
    network = EarlyExitNetwork(Two(), {"stage": FusedAuxHead(None, K)}, 0.2, example_input=batch).eval()
    last = network.backbone(x, scale, shift=0.5 if named else 0.0)
    torch.testing.assert_close(network.logits(batch)[1], last)
    network.set_rules(1.0)
    assert torch.equal(network(batch).label, last.argmax(1))
    runner = make_runner(network, batch)
    assert torch.equal(runner(batch).label, last.argmax(1))
    with pytest.raises(TypeError, match="x: got tuple without a tensor"):
        network((1, 2))


class Halves(nn.Module):
    """Its first layer's map is read by halves, as ShuffleNet's blocks read theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.shuffle = nn.ChannelShuffle(2)
        self.conv = nn.Conv2d(4, 4, 1)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shuffle(x)
        first, second = x.chunk(2, dim=1)
        return self.fc(torch.cat((first, self.conv(second)), dim=1).mean((2, 3)))


def test_a_convolution_of_some_channels_tells_where_they_are() -> None:
    network = EarlyExitNetwork(Halves(), {"shuffle": FusedAuxHead(None, 3)}, example_input=torch.randn(2, 8, 8, 8))
    assert network.describe().startswith("shuffle [N, C, H, W]")


class Copying(nn.Module):
    """Its first layer returns a map that nothing but the reader of a copy tells the channels of."""

    def __init__(self, copied: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.folded, self.conv, self.fc, self.copied = (
            nn.Unflatten(1, (8, 4)),
            nn.Conv2d(8, 4, 1),
            nn.Linear(4, 3),
            copied,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(self.copied(self.folded(x))).mean((2, 3)))


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": Tensor.clone,
    "cast": lambda y: y.double().float(),
    "strides": lambda y: y.transpose(2, 3).contiguous(),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_who_reads_a_copy_tells_where_the_channels_are(copied: Callable[[Tensor], Tensor]) -> None:
    network = EarlyExitNetwork(Copying(copied), {"folded": FusedAuxHead(None, 3)}, example_input=torch.randn(2, 32, 8))
    assert network.describe().startswith("folded [N, C, H, W]")


class Negating(nn.Module):
    """Returns a lazily negated view."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(torch.zeros_like(x), -x).conj().imag


def test_a_lazily_negated_map_is_told_by_who_reads_it() -> None:
    backbone = nn.Sequential(nn.Conv2d(3, 8, 1), Negating(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(256, 3))
    network = EarlyExitNetwork(backbone, {"1": FusedAuxHead(None, 3)}, example_input=torch.randn(2, 3, 8, 8))
    assert network.describe().startswith("1 [N, C, H, W]")
