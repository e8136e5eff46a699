"""Padding of tokens: a sample's answer does not depend on how long the others of its batch are."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from auxhead.model import EarlyExitNetwork, Extract, FusedAuxHead, attach, load_checkpoint, save_checkpoint
from auxhead.model.listening.reading import read_tokens
from support.example_models import needs_gpu
from support.several_inputs import Words, words
from torch import Tensor, nn

K, D = 4, 16
TAPS = ("layers.0", "layers.1")
IDS = torch.randint(1, 50, (3, 5), generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    """Tokens [N, T, D] that attend to those that are kept, in whatever order they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.linear = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        scores = (self.mix(self.norm(x)) @ x.transpose(1, 2)).masked_fill(~kept[:, None], -torch.inf)
        return x + self.linear(torch.nan_to_num(scores.softmax(2)) @ x)


class Encoder(nn.Module):
    """Shaped as HuggingFace's classifiers of text: arguments that may be left out, and an object that is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(50, D), nn.ModuleList([Layer(), Layer()])
        self.fc = nn.Linear(D, K)

    def encode(self, ids: Tensor, kept: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, kept)
        kept = kept[:, -x.shape[1] :, None].float()
        return self.fc((x * kept).sum(1) / kept.sum(1).clamp(min=1))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Any:
        kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        kept = kept[:, 0, 0] if kept.ndim == 4 else kept
        return SimpleNamespace(logits=self.encode(input_ids, kept > 0))


class PaddingMasked(Encoder):
    """Shaped as PyTorch's encoders are: the mask is not 0 at padding."""

    def forward(self, src: Tensor, src_key_padding_mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.encode(src, src_key_padding_mask == 0)


class AnyArguments(Encoder):
    """Hands on what it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().forward(*args, **kwargs)


class OfDict(Encoder):
    """Takes a whole batch as one argument."""

    def forward(self, batch: Mapping[str, Tensor]) -> Any:  # type: ignore[override]
        return super().forward(**batch)


class ClassToken(Encoder):
    """Reads a token of its own before the others."""

    def encode(self, ids: Tensor, kept: Tensor) -> Tensor:
        return super().encode(
            torch.cat([torch.zeros_like(ids[:, :1]), ids], 1), nn.functional.pad(kept, (1, 0), value=1)
        )


class Pad(Encoder):
    """Names its mask as nobody else does."""

    def forward(self, ids: Tensor, pad: Tensor) -> Tensor:  # type: ignore[override]
        return self.encode(ids, pad == 0)


def padded(width: int, side: str = "right") -> tuple[Tensor, Tensor]:
    """Ids and the mask of HuggingFace, with zeros beside the tokens."""
    by = (0, width - IDS.shape[1]) if side == "right" else (width - IDS.shape[1], 0)
    return nn.functional.pad(IDS, by), nn.functional.pad(torch.ones_like(IDS), by)


def network_of(backbone: nn.Module, example: Any = None, pool: str = "avg", **options: Any) -> EarlyExitNetwork:
    torch.manual_seed(1)
    for parameter in backbone.parameters():
        nn.init.normal_(parameter, std=0.3)
    heads = {tap: FusedAuxHead(D, K, pool=pool, device=backbone.fc.weight.device) for tap in TAPS}
    return EarlyExitNetwork(backbone, heads, 0.5, example_input=example, **options).eval()


def saved_and_loaded(network: EarlyExitNetwork, path: Path) -> EarlyExitNetwork:
    save_checkpoint(path, network)
    return load_checkpoint(path, type(network.backbone)()).network


@pytest.mark.parametrize(("pool", "side"), [("avg", "left"), ("max", "right"), ("first", "left")])
def test_an_answer_does_not_depend_on_padding(pool: str, side: str, tmp_path: Path) -> None:
    network = network_of(Encoder(), padded(7), pool)
    loaded, said = saved_and_loaded(network, tmp_path), []
    for x in (padded(5), padded(12, side)):
        by_name = dict(zip(("input_ids", "attention_mask"), x, strict=True))
        answers = [*network(x), *network(by_name, stop=True), *loaded(x)]
        said.append([*answers, *network.logits(by_name), *network.train().logits(x), *loaded.logits(by_name)])
        network.eval()
    for alone, among_longer in zip(*said, strict=True):
        torch.testing.assert_close(among_longer, alone)
    torch.testing.assert_close([*said[1][-3:]], network.logits(IDS))
    sum(each.sum() for each in network.logits(padded(12, side))).backward()
    assert all(each.grad.isfinite().all() for each in network.parameters() if each.grad is not None)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(Encoder, torch.float32), (PaddingMasked, torch.bool), (AnyArguments, torch.int64), (OfDict, torch.uint8)],
)
def test_a_mask_is_found_by_its_name(kind: type[Encoder], dtype: torch.dtype, device: str) -> None:
    def batch(width: int) -> Any:
        ids, mask = padded(width)
        mask = (1 - mask if kind is PaddingMasked else mask).to(dtype)
        by_name = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        return {PaddingMasked: tuple(by_name.values()), OfDict: (by_name,)}.get(kind, by_name)

    network = network_of(kind().to(device), batch(7))
    name = "src_key_padding_mask" if kind is PaddingMasked else "attention_mask"
    assert [extract.mask for extract in network.extract.values()] == [name, name]
    said = f"layers.0 [N, T, D]: pool 'avg', {K} classes, over the tokens of {name}"
    assert network.describe().splitlines()[0] == said
    for stop in (False, True):
        torch.testing.assert_close(
            [*network(batch(12), stop=stop)], [*network(batch(5), stop=stop)], rtol=1e-4, atol=1e-5
        )


def test_a_head_that_rectifies_does_so_before_the_mean() -> None:
    network = EarlyExitNetwork(
        Encoder().eval(), {TAPS[0]: FusedAuxHead(D, K, hidden_features=8, rectifies=True)}, example_input=padded(7)
    ).eval()
    plain, masked = network.logits(IDS)[0], network.logits(padded(12))[0]
    torch.testing.assert_close(masked, plain)


def test_a_sample_of_padding_alone_reads_as_zeros() -> None:
    network = network_of(Encoder(), padded(7))
    ids, mask = padded(7)
    mask[1] = 0
    for pool in ("avg", "max", "first"):
        network.heads[0].pool = pool
        logits = network.logits((ids, mask))
        torch.testing.assert_close(logits[0][1], network.heads[0].linear.bias)
        torch.testing.assert_close(logits[0][0], network.logits(padded(7))[0][0])
        logits[0].sum().backward()
    assert network.backbone.embedding.weight.grad.isfinite().all()


def test_what_lies_in_padding_does_not_matter() -> None:
    network, (ids, mask) = network_of(Encoder(), padded(7)), padded(7)
    wanted = network.logits((ids, mask))[0]

    def spoil(_layer: nn.Module, _inputs: Any, y: Tensor) -> Tensor:
        return torch.where(mask[..., None] > 0, y, torch.nan)

    handle = network.backbone.layers[0].register_forward_hook(spoil)
    torch.testing.assert_close(network.logits((ids, mask))[0], wanted)
    handle.remove()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_mean_is_summed_up_in_float32(dtype: torch.dtype) -> None:
    x, mask = torch.randn(2, 4096, D, generator=torch.Generator().manual_seed(0)).to(dtype) + 64, torch.ones(2, 4096)
    mask[:, 4000:] = 0
    read = read_tokens("tap", Extract(mask="mask"), FusedAuxHead(D, K), {"mask": mask}, x)
    assert read.dtype == dtype and torch.equal(read, x[:, :4000].double().mean(1).to(dtype))


def test_masks_that_are_not_one_number_a_token_are_not_found() -> None:
    ids, mask = padded(7)
    for backbone, x in ((Encoder(), (ids, mask[:, None, None])), (ClassToken(), (ids, mask)), (Encoder(), ids)):
        network = network_of(backbone, x)
        assert network.describe().count("pool 'avg', 4 classes, over all tokens, padding included") == 2
        assert torch.isfinite(network.logits(x)[0]).all()


def test_none_reads_padding_as_tokens(tmp_path: Path) -> None:
    network = network_of(Encoder(), padded(7), extract={tap: Extract(mask=None) for tap in TAPS})
    assert network.describe().count("padding included") == 2
    read: list[Tensor] = []
    network.backbone.layers[0].register_forward_hook(lambda _layer, _inputs, y: read.append(y))
    got = network.logits(padded(12))[0]
    torch.testing.assert_close(got, network.heads[0].linear(read[0].mean(1)))
    torch.testing.assert_close(saved_and_loaded(network, tmp_path).logits(padded(12))[0], got)


def test_a_name_is_saved_and_files_without_one_are_read_as_they_were_written(tmp_path: Path) -> None:
    network = network_of(Encoder(), padded(7))
    assert saved_and_loaded(network, tmp_path).extract == network.extract
    path = tmp_path / "model.json"
    content = json.loads(path.read_text())
    for head in content["heads"].values():
        assert head["extract"].pop("mask") == "attention_mask"
    path.write_text(json.dumps(content))
    loaded = load_checkpoint(tmp_path, Encoder()).network
    loaded.check_taps(padded(7))
    assert loaded.describe().count("padding included") == 2


def test_a_mask_that_comes_later_is_found_then() -> None:
    network = network_of(Encoder(), (IDS,))
    torch.testing.assert_close(network.logits(padded(12)), network.logits(padded(5)))


def test_a_name_of_ones_own_says_what_it_tells() -> None:
    (ids, mask), (longer, of_longer) = padded(5), padded(12)
    network = network_of(Pad(), (ids, 1 - mask), extract={tap: Extract(mask="~pad") for tap in TAPS})
    assert network.describe().count("over the tokens of ~pad") == 2
    torch.testing.assert_close(network.logits((longer, 1 - of_longer)), network.logits((ids, 1 - mask)))


class Both(Encoder):
    """Has masks of both kinds."""

    def forward(self, ids: Tensor, attention_mask: Tensor, decoder_attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.encode(ids, attention_mask > 0)


X, MASK = padded(7)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "two": (
        lambda: network_of(Both(), (X, MASK, MASK)),
        "heads['layers.0']: finds the masks attention_mask and decoder_attention_mask, wants one of them: "
        "extract={'layers.0': Extract(mask='attention_mask')}",
    ),
    "opposite": (
        lambda: network_of(PaddingMasked(), padded(5)),
        "src_key_padding_mask calls all of a sample padding, wants numbers over 0 at tokens, or 0 if its name ends in "
        "'padding_mask'; if it says the opposite, mask='~src_key_padding_mask' in its Extract",
    ),
    "added": (
        lambda: network_of(Encoder(), (X, (MASK - 1) * 1e9)),
        "heads['layers.0']: attention_mask calls all of a sample padding, wants numbers over 0 at tokens",
    ),
    "rank": (
        lambda: network_of(Encoder(), (X, MASK[:, None, None]), extract={TAPS[0]: Extract(mask="attention_mask")}),
        "heads['layers.0']: attention_mask is a tensor [3, 1, 1, 7] of torch.int64, wants [3, 7]",
    ),
    "class token": (
        lambda: network_of(ClassToken(), (X, MASK), extract={TAPS[0]: Extract(mask="attention_mask")}),
        "heads['layers.0']: attention_mask is a tensor [3, 7] of torch.int64, wants [3, 8]",
    ),
    "later": (
        lambda: network_of(Encoder(), (X, MASK)).logits((X, MASK[:, None, None])),
        "heads['layers.0']: attention_mask is a tensor [3, 1, 1, 7] of torch.int64, wants [3, 7], as the tap has",
    ),
    "of one sample": (
        lambda: network_of(Encoder(), (X, MASK))((X, MASK[:1])),
        "attention_mask is a tensor [1, 7] of torch.int64, wants [3, 7]",
    ),
    "misspelt": (
        lambda: network_of(Encoder(), (X, MASK), extract={TAPS[0]: Extract(mask="atention_mask")}),
        "mask: got 'atention_mask', wants an argument of the backbone: ['input_ids', 'attention_mask',",
    ),
    "no place": (
        lambda: network_of(AnyArguments(), {"input_ids": X, "attention_mask": MASK})((X, MASK)),
        "attention_mask has no place that is known, wants [3, 7], as the tap has tokens, at its place or in a dict",
    ),
    "not pooled": (
        lambda: EarlyExitNetwork(
            Encoder(),
            {TAPS[0]: nn.Sequential(nn.Flatten(), nn.Linear(7 * D, 8), nn.Tanh(), nn.Linear(8, K))},
            extract={TAPS[0]: Extract(mask="attention_mask")},
            example_input=(X, MASK),
        ),
        "extract['layers.0']: mask: got 'attention_mask', wants None: its head pools no tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        call()


@pytest.mark.parametrize("mask", [1, "", "~", True])
def test_a_mask_that_is_no_name_is_refused(mask: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"mask: got {mask!r}, wants the name of an argument")):
        Extract(mask=mask)


def test_a_compiled_network_leaves_padding_out() -> None:
    network = network_of(PaddingMasked(), (X, 1 - MASK))
    compiled = torch.compile(network.logits, fullgraph=True, backend="eager")
    torch.testing.assert_close([*compiled((X, 1 - MASK))], network.logits((IDS, torch.zeros_like(IDS))))


@pytest.mark.parametrize("given", [lambda x: x, lambda x: tuple(x.values())], ids=["dict", "tuple"])
def test_heads_are_placed_beside_a_mask_that_all_layers_read(given: Callable[[dict[str, Tensor]], Any]) -> None:
    ids, mask = padded(7)
    network = attach(Encoder().eval(), example_input=given({"input_ids": ids, "attention_mask": mask}))
    assert network.taps[0] == "layers.0" and "over the tokens of attention_mask" in network.describe()


def test_a_head_that_reads_the_first_token_does_not_say_that_it_reads_all() -> None:
    said = network_of(Encoder(), IDS, pool="first").describe()
    assert said.splitlines() == [f"{tap} [N, T, D]: pool 'first', 4 classes" for tap in TAPS]


def test_nested_tensors_are_refused_with_what_keeps_tokens_dense() -> None:
    model, x = Words().eval(), words(9, 4)
    model.encoder.use_nested_tensor = True
    with pytest.raises(ValueError, match="returns a nested tensor.*; set use_nested_tensor = False on the nn.Transfor"):
        attach(model, ["encoder.layers.0"], example_input=x)
    model.encoder.use_nested_tensor = False
    with torch.no_grad():
        network = attach(model, ["encoder.layers.0"], example_input=x).eval()
        assert network(x).confidence.shape == (2,)
