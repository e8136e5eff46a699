"""hidden_layers.py: heads with a ReLU, a norm or a hidden linear layer, in one launch, against float64."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from auxhead.kernels import (
    ACTIVATIONS,
    CRITERIA,
    ExitBuffers,
    ExitHead,
    ExitLaunch,
    HiddenLayers,
    LaunchConfig,
    fused_head,
    fused_head_reference,
    runs_triton,
)
from auxhead.kernels.launch.head_view import head_view
from support.head_cases import DTYPES, assert_same_bits, make_input, readable, taken_counters
from support.hidden_layer_cases import LAYERS, chain, check, make
from support.layouts import MAP_LAYOUTS, TOKEN_LAYOUTS
from torch import nn

pytestmark = pytest.mark.usefixtures("poisoned_empty", "tiles_from_7")


@pytest.fixture(params=["by rule", "by tiles"])
def last_layer(request, monkeypatch):
    """Who multiplies the last layer behind a hidden one: those that decide, if it is small, or tiles, of any size."""
    if request.param == "by tiles":
        monkeypatch.setattr("auxhead.kernels.launch.choose_config._LARGE_LAST_LAYER", 1)


@pytest.mark.usefixtures("last_layer")
@pytest.mark.parametrize("samples", [1, 17])
@pytest.mark.parametrize("layers", LAYERS)
def test_layers(layers, samples, device):
    for dtype in DTYPES.values():
        check(*make((samples, 21, 3, 5), 11, dtype=dtype, device=device, **LAYERS[layers]))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, device):
    for dtype in DTYPES.values():
        x, weight, bias, hidden = make((17, 30), 7, width=29, activation=activation, dtype=dtype, device=device)
        check(3 * x, weight, bias, hidden)  # where hardswish and gelu are flat, and where they are not


def test_float32_logits_of_many_hidden_features_are_as_exact_as_pytorchs(device):
    """Tensor cores round sums toward zero: 512 in one step would be five times as far off, which a maximum hides."""
    x, weight, bias, hidden = make((256, 64), 18, width=512, activation="relu", device=device)
    exact = chain(x.double(), weight.double(), bias.double(), hidden.to(torch.float64), "none", 1)[0]
    said = fused_head(x, weight, bias, pool="none", hidden=hidden).probs.double().log()
    logits = (said, chain(x, weight, bias, hidden, "none", 1)[0].double(), exact)
    ours, pytorchs, exact = (one - one.mean(1, keepdim=True) for one in logits)
    assert (ours - exact).square().mean() <= 4 * (pytorchs - exact).square().mean()


@pytest.mark.parametrize("pool, samples", [("avg", 2), ("max", 17)])
def test_a_relu_before_the_pool(samples, pool, device):
    for pool_size in (1, (2, 3)):
        x, *head = make(
            (samples, 5, 4, 6), 7, rectifies=True, norm="affine", width=9, pool=pool, pool_size=pool_size, device=device
        )
        check(x - 1.5, *head, pool=pool, pool_size=pool_size)


@pytest.mark.parametrize("shape", [(3, 100), (3, 100, 2, 2)])
def test_a_norm_of_equal_features(shape, device):
    """Nothing but their mean's rounding tells them from it: hundreds of times as much, divided by sqrt(eps)."""
    x, *head = make(shape, 10, norm="affine", device=device)
    check(torch.full_like(x, 37.3), *head)


@pytest.mark.parametrize("layers", ["norm", "all"])
@pytest.mark.parametrize(
    "shape, pool",
    [((3, 6, 20), "avg"), ((3, 6, 20), "max"), ((17, 6, 20), "first"), ((3, 45), "avg"), ((2, 3, 4, 5), "none")],
    ids=readable,
)
def test_tokens_vectors_and_flattened_maps(shape, pool, layers, device):
    check(*make(shape, 10, pool=pool, device=device, **LAYERS[layers]), pool=pool)


@pytest.mark.usefixtures("last_layer")
@pytest.mark.parametrize("samples, classes, width", [(1, 2, None), (17, 2, 7), (1, 1031, 1), (17, 1031, 300)])
def test_many_and_few_classes_and_hidden_features(samples, classes, width, device):
    norm = "affine" if width is None else None
    check(*make((samples, 19), classes, norm=norm, width=width, dtype=torch.float16, device=device))


def test_more_features_than_a_step(device):
    check(*make((2, 1100), 5, device=device, **LAYERS["norm, linear"]))


@pytest.mark.parametrize("layout", MAP_LAYOUTS)
def test_layouts_of_maps(layout, device):
    x = MAP_LAYOUTS[layout](lambda shape: make_input(shape, device=device), 2, 5, 3, 4)
    check(x, *make((2, 5, 3, 4), 6, device=device, **LAYERS["norm, linear"])[1:])


@pytest.mark.parametrize("layout", TOKEN_LAYOUTS)
def test_layouts_of_tokens(layout, device):
    x = TOKEN_LAYOUTS[layout](lambda shape: make_input(shape, device=device), 2, 5, 6)
    check(x, *make((2, 5, 6), 6, device=device, **LAYERS["all"])[1:])


@pytest.mark.usefixtures("last_layer")
@pytest.mark.parametrize("samples", [2, 17])
def test_parameters_are_read_by_their_strides(samples, device):
    x, weight, bias, hidden = make((samples, 20), 6, norm="affine", width=14, device=device)

    def apart(tensor):
        larger = torch.full([2 * size for size in tensor.shape], float("nan"), device=device)
        view = larger[tuple(slice(None, None, 2) for _ in tensor.shape)]
        return view.copy_(tensor)

    strided = hidden.with_tensors([apart(one) for _, one in hidden.tensors()])
    check(x, apart(weight), apart(bias), strided)


@pytest.mark.usefixtures("last_layer")
@pytest.mark.parametrize("samples, rectifies", [(3, True), (17, False)])
def test_a_nan_stays_in_its_sample(samples, rectifies, device):
    for activation in ACTIVATIONS:
        x, weight, bias, hidden = make(
            (samples, 6, 3, 3), 5, rectifies=rectifies, width=7, activation=activation, device=device
        )
        whole = fused_head(x, weight, bias, threshold=0.0, hidden=hidden)
        x[1, 2, 1, 1] = float("nan")
        out = fused_head(x, weight, bias, threshold=0.0, hidden=hidden)
        assert out.probs[1].isnan().all() and out.confidence[1].isnan() and not out.exit[1]
        others = [n for n in range(samples) if n != 1]
        assert_same_bits(type(out)(*(one[others] for one in whole)), type(out)(*(one[others] for one in out)))


@pytest.mark.usefixtures("last_layer")
@pytest.mark.parametrize("samples", [3, 17])
def test_repeats_bit_for_bit(samples, device):
    quick = device.type == "cuda" or samples == 3  # interpreted, a tile takes a second
    for layers in LAYERS if quick else ("norm", "all"):
        classes = 1031 if quick else 150
        *head, hidden = make((samples, 21, 3, 5), classes, device=device, **LAYERS[layers])
        assert_same_bits(fused_head(*head, hidden=hidden), fused_head(*head, hidden=hidden))


def test_no_samples_and_float64(device):
    *head, hidden = make((0, 20), 6, device=device, **LAYERS["all"])
    assert fused_head(*head, hidden=hidden).probs.shape == (0, 6)
    if device.type == "cpu":
        *head, hidden = make((4, 20), 6, dtype=torch.float64, **LAYERS["all"])
        exact = chain(*head, hidden, "avg", 1)[0].softmax(-1)
        torch.testing.assert_close(fused_head(*head, hidden=hidden).probs, exact)


@pytest.mark.parametrize("layers", LAYERS)
def test_gradients_of_every_parameter(layers, device):
    x, weight, bias, hidden = make((5, 6, 3, 3), 4, device=device, **LAYERS[layers])
    leaves = [one for one in (x, weight, bias, *(one for _, one in hidden.tensors())) if one is not None]
    for one in leaves:
        one.requires_grad_()
    out = fused_head(x, weight, bias, hidden=hidden)
    seeds = torch.randn_like(out.probs), torch.randn_like(out.confidence)
    grads = torch.autograd.grad([out.probs, out.confidence], leaves, seeds)
    probs = chain(x, weight, bias, hidden, "avg", 1)[0].softmax(-1)
    wanted = torch.autograd.grad([probs, probs.amax(-1)], leaves, seeds)
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_operator_keeps_its_contract():
    x, weight, bias, hidden = make((3, 20), 4, **LAYERS["all"])
    for tensor in (x, weight, hidden.weight, hidden.norm_weight):
        tensor.requires_grad_()
    arguments = (x, weight, bias, None, None, 1.0, 0.5, "avg", (1, 1), "max_prob", True, *hidden)
    torch.library.opcheck(torch.ops.auxhead.fused_head.default, arguments)


def test_transforms_see_plain_pytorch():
    x, weight, bias, hidden = make((5, 20), 4, **LAYERS["all"])
    together = torch.vmap(lambda one: fused_head(one[None], weight, bias, hidden=hidden).probs[0])(x)
    torch.testing.assert_close(together, fused_head(x, weight, bias, hidden=hidden).probs)


#: Ways to the sums of a hidden layer, which several programs add up, or one.
WAYS = {
    "split, the last to arrive adds up": LaunchConfig(1, 4, 1, 4, 1, 16, 4, 64, 1, 1, 4, last_rows=16),
    "split, the last one waits": LaunchConfig(1, 8, 1, 4, 1, 16, 4, 64, 2, 1, 4, waits=True, last_rows=32),
    "alone": LaunchConfig(1, 32, 1, 4, 1, 64, 1, 64, 1, 1, 4, last_rows=16),
    "tiles of a sample": LaunchConfig(1, 16, 1, 4, 16, 16, 2, 64, 1, 1, 4, last_rows=16),
    "tiles": LaunchConfig(16, 16, 1, 4, 16, 16, 2, 64, 2, 1, 4, last_rows=64),
    "packed": LaunchConfig(8, 16, 1, 4, 32, 16, 1, 64, 1, 1, 4, weight_buffers=3, features="packed", last_rows=16),
    "in place": LaunchConfig(8, 16, 1, 1, 16, 16, 2, 64, 1, 1, 4, weight_buffers=2, features="in place", last_rows=16),
}


@pytest.mark.parametrize(
    "way, samples, programs", [*product(WAYS, [1], [0, 1]), *product(WAYS, [9], [0]), ("in place", 70, 1)]
)
def test_tiles_multiply_the_last_layer(way, samples, programs, device):
    """Behind any way to the hidden features they say what the others say, twice the same, and leave nothing behind."""
    from auxhead.kernels.fused_head import launch_fused_head

    shape, pool = ((samples, 21), "none") if way == "in place" else ((samples, 21, 3, 2), "avg")
    for number, (classes, width) in enumerate([(2, 1), (37, 33), (131, 64)] if samples == 1 else [(37, 33)]):
        dtype, criterion = [*DTYPES.values()][number], [*CRITERIA][(number + samples) % len(CRITERIA)]
        kind = {"width": width, "bias": number != 1, "pool": pool}
        x, weight, bias, hidden = make(shape, classes, dtype=dtype, device=device, **kind)
        if not runs_triton(x):
            pytest.skip("needs the kernel")
        view = head_view(tuple(x.shape), x.stride(), pool, (1, 1))
        options = {"criterion": criterion, "hidden": hidden, "pool_max": False, "return_probs": number < 2}
        config = replace(WAYS[way], max_programs=programs)
        with taken_counters() as taken:
            wanted, out, again = (
                launch_fused_head(x, view, weight, bias, 1.3, 0.5, config=one, **options)
                for one in (replace(config, last_rows=0), config, config)
            )
        assert not any(counters.any() for counters in taken), "what programs leave for each other is cleared"
        assert torch.equal(out.label, wanted.label) and torch.equal(out.exit, wanted.exit)
        for one, other, same in zip(out, wanted, again, strict=True):
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
                assert torch.equal(one, same)


@pytest.mark.usefixtures("last_layer")
@pytest.mark.parametrize("samples, classes", [(1, 10), (17, 10), (3, 1031)])
def test_plain_and_hidden_heads_of_a_network_in_one_launch(samples, classes, device):
    heads, inputs, spoken = [], [], []
    for kind in ({}, LAYERS["linear"], LAYERS["norm"], LAYERS["all"]):
        x, weight, bias, hidden = make((samples, 21, 3, 5), classes, device=device, **kind)
        if not runs_triton(x):
            pytest.skip("needs the kernel")
        heat, limit = torch.ones((), device=device), torch.zeros((), device=device)
        options = {"pool": "avg", "pool_size": (1, 1), "temperature": heat, "hidden": hidden}
        ordered = fused_head_reference(x, weight, bias, threshold=limit, **options).confidence.sort().values
        limit.copy_(ordered[(samples - 1) // 2 : (samples + 3) // 2].mean() + 1e-4)  # about half of the samples go
        heads.append(ExitHead(weight, bias, heat, limit, "avg", (1, 1), hidden=hidden))
        inputs.append(x)
        spoken.append(fused_head_reference(x, weight, bias, threshold=limit, **options))
    buffers = ExitBuffers.allocate(len(heads), samples, classes, with_probs=True, device=x.device)
    launch = ExitLaunch(buffers, 0, heads)
    for _ in range(2):  # the second one shows that the first has put its zeros back
        launch(inputs)
        for place, output in enumerate(spoken):
            torch.testing.assert_close(buffers.probs[place], output.probs)
            assert torch.equal(buffers.label[place], output.label)
        label, exit_index, _, probs = buffers.answer(buffers.packed_answer)
        for n in range(samples):
            place = next((place for place, output in enumerate(spoken) if output.exit[n]), len(spoken) - 1)
            assert exit_index[n] == place and label[n] == spoken[place].label[n]
            torch.testing.assert_close(probs[n], spoken[place].probs[n])
    for space in launch._spaces.values():
        logits = space.arguments.last[-1] if space.constants.last_n else torch.zeros(1)
        assert not logits.any(), "what tiles of the last layer leave is cleared"


ONES = torch.ones(20)
BAD = {
    "no layers": (TypeError, "hidden: got dict", {"rectifies": True}),
    "rectifies": (TypeError, "hidden.rectifies: got int", HiddenLayers(1)),
    "text as eps": (TypeError, "hidden.eps: got str", HiddenLayers(eps="1e-5")),
    "negative eps": (ValueError, "hidden.eps: got -1.0", HiddenLayers(eps=-1.0)),
    "eps that is NaN": (ValueError, "hidden.eps: got nan", HiddenLayers(eps=float("nan"))),
    "no eps": (ValueError, "hidden.eps: got None", HiddenLayers(norm_weight=ONES)),
    "activation": (ValueError, "hidden.activation: got 'tanh'", HiddenLayers(activation="tanh")),
    "activation's type": (TypeError, "hidden.activation: got ReLU", HiddenLayers(activation=nn.ReLU())),
    "a number as weight": (TypeError, "hidden.weight: got float", HiddenLayers(weight=1.0)),
    "norm's shape": (ValueError, r"hidden.norm_bias: got shape \[19\]", HiddenLayers(eps=0.0, norm_bias=ONES[1:])),
    "weight's shape": (ValueError, r"hidden.weight: got shape \[6, 19\]", HiddenLayers(weight=torch.ones(6, 19))),
    "weight's rank": (ValueError, r"hidden.weight: got shape \[20\]", HiddenLayers(weight=ONES)),
    "too many": (ValueError, r"hidden.weight: got shape \[1025, 20\]", HiddenLayers(weight=torch.ones(1025, 20))),
    "none": (ValueError, r"hidden.weight: got shape \[0, 20\]", HiddenLayers(weight=torch.ones(0, 20))),
    "bias alone": (ValueError, "hidden.bias: got a tensor", HiddenLayers(bias=ONES)),
    "bias's shape": (ValueError, r"hidden.bias: got shape \[20\]", HiddenLayers(weight=torch.ones(6, 20), bias=ONES)),
    "dtype": (TypeError, "hidden.weight: got torch.float16", HiddenLayers(weight=torch.ones(6, 20).half())),
    "device": (ValueError, "hidden.norm_weight: got device meta", HiddenLayers(eps=0.0, norm_weight=ONES.to("meta"))),
    "last layer": (ValueError, r"weight: got shape .* \[num_classes, 5\]", HiddenLayers(weight=torch.ones(5, 20))),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_refused_by_name(kind):
    error, message, hidden = BAD[kind]
    with pytest.raises(error, match=f"^{message}"):
        fused_head(torch.ones(3, 20), torch.ones(4, 6 if kind == "last layer" else 20), hidden=hidden)
