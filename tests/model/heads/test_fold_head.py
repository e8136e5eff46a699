"""fold_head.py: folded heads answer as the layers that they stand for, and what is not linear is left alone."""

import pytest
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead, ModuleHead, fuse_aux_heads
from support.head_sequentials import MAP, avg, drop, flat, maximum, named, same, seq
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm


def norm(make: type[nn.Module], channels: int, **options: object) -> nn.Module:
    """A batch norm that has seen something."""
    layer = make(channels, **options)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.3, 3.0)
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


def norm1(channels: int, **options: object) -> nn.Module:
    return norm(nn.BatchNorm1d, channels, **options)


def norm2(channels: int) -> nn.Module:
    return norm(nn.BatchNorm2d, channels)


def without(name: str, head: nn.Sequential) -> nn.Sequential:
    """A head whose batch norm has lost a parameter, without which PyTorch runs it."""
    setattr(head[2], name, None)
    return head


FOLDED = {
    "batch norm": lambda: seq(avg(1), flat(), norm1(6), nn.Linear(6, 5)),
    "batch norm without parameters": lambda: seq(avg(1), flat(), norm1(6, affine=False), nn.Linear(6, 5)),
    "batch norm of a grid": lambda: seq(avg((2, 3)), flat(), norm1(36), drop(0.5), nn.Linear(36, 5), nn.Softmax(1)),
    "two linears": lambda: seq(avg(1), flat(), nn.Linear(6, 9), nn.Linear(9, 5, bias=False)),
    "all behind the pool": lambda: seq(avg(1), flat(), norm1(6), nn.Linear(6, 9), norm1(9), nn.Linear(9, 5)),
    "convolution": lambda: seq(nn.Conv2d(6, 4, 1), avg(1), flat(), nn.Linear(4, 5)),
    "convolution of a grid": lambda: seq(nn.Conv2d(6, 4, 1, bias=False), avg((2, 3)), flat(), nn.Linear(24, 5)),
    "convolution without a pool": lambda: seq(nn.Conv2d(6, 2, 1), flat(), nn.Linear(70, 5)),
    "norms and convolutions": lambda: seq(
        norm2(6), nn.Conv2d(6, 8, 1, padding="same"), norm2(8), same(), nn.Conv2d(8, 3, 1), avg(2), flat(),
        norm1(12), nn.Linear(12, 5),
    ),
    "nested": lambda: named(
        pool=seq(nn.Conv2d(6, 4, 1), avg(1)), rest=seq(flat(), named(norm=norm1(4), fc=nn.Linear(4, 5)))
    ),
    "a norm of the map": lambda: seq(norm2(6), avg(1), flat(), nn.Linear(6, 5)),
    "batch norms around a hidden layer": lambda: seq(
        avg(1), flat(), norm1(6), nn.Linear(6, 9, bias=False), norm1(9), nn.ReLU(), norm1(9), nn.Linear(9, 5)
    ),
    "a hidden layer of two": lambda: seq(
        avg(1), flat(), nn.Linear(6, 8), nn.Linear(8, 9), norm1(9), norm1(9), nn.GELU(), nn.Linear(9, 5)
    ),
    "a convolution before a hidden layer": lambda: seq(
        norm2(6), nn.Conv2d(6, 4, 1), avg(1), flat(), nn.Linear(4, 9), nn.Hardswish(), nn.Linear(9, 5), nn.Softmax(1)
    ),
    "a convolution after a ReLU": lambda: seq(nn.ReLU(), nn.Conv2d(6, 4, 1), avg(1), flat(), nn.Linear(4, 5)),
    "a batch norm without a bias": lambda: without("bias", seq(avg(1), flat(), norm1(6), nn.Linear(6, 5))),
    "a batch norm without a weight": lambda: without("weight", seq(avg(1), flat(), norm1(6), nn.Linear(6, 5))),
    "a batch norm after a layer norm": lambda: seq(
        avg((2, 3)), flat(), nn.LayerNorm(36), norm1(36), nn.Linear(36, 9), nn.ReLU(), nn.Linear(9, 5)
    ),
}  # fmt: skip


@pytest.mark.parametrize("make", FOLDED.values(), ids=FOLDED)
def test_it_answers_as_its_layers(make, device):
    module, x = make().eval().to(device), torch.randn(MAP, device=device)
    head = FusedAuxHead.from_module(module)
    with torch.no_grad():
        wanted = module(x)
        probs = wanted if isinstance(module[-1], nn.Softmax) else wanted.softmax(1)
        torch.testing.assert_close(head(x).probs, probs, rtol=1e-4, atol=1e-5)
    assert not set(map(id, head.parameters())) & set(map(id, module.parameters()))
    assert not head.training and head.linear.bias is not None
    report = fuse_aux_heads(nn.ModuleDict({"head": module.train()}))
    assert not report.replaced and "in eval mode it could be folded" in report.left_alone["head"]


def test_heads_of_a_model_are_folded_in_place():
    model = nn.ModuleDict({"exit": FOLDED["batch norm"](), "other": seq(avg(1), flat(), nn.Linear(6, 5))}).eval()
    x = torch.randn(MAP)
    with torch.no_grad():
        wanted = model["exit"](x).softmax(1)
        linear = model["other"][2]
        report = fuse_aux_heads(model)
        assert [*report.replaced] == ["exit", "other"] and not report.left_alone
        torch.testing.assert_close(model["exit"](x).probs, wanted, rtol=1e-4, atol=1e-5)
    assert model["other"].linear is linear, "what needs no folding shares its parameters"


NOT_LINEAR = {
    "an activation that is not known": lambda: seq(
        avg(1), flat(), norm1(6), nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5)
    ),
    "two activations": lambda: seq(flat(), nn.Linear(210, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 5)),
    "a batch norm before a layer norm": lambda: seq(avg(1), flat(), norm1(6), nn.LayerNorm(6), nn.Linear(6, 5)),
    "a convolution before a layer norm": lambda: seq(
        nn.Conv2d(6, 4, 1), avg(1), flat(), nn.LayerNorm(4), nn.Linear(4, 5)
    ),
    "a convolution before a ReLU": lambda: seq(nn.Conv2d(6, 4, 1), nn.ReLU(), avg(1), flat(), nn.Linear(4, 5)),
    "a convolution of 3x3": lambda: seq(nn.Conv2d(6, 4, 3), avg(1), flat(), nn.Linear(4, 5)),
    "a convolution that strides": lambda: seq(nn.Conv2d(6, 4, 1, stride=2), avg(1), flat(), nn.Linear(4, 5)),
    "a convolution that pads": lambda: seq(nn.Conv2d(6, 4, 1, padding=1), avg(1), flat(), nn.Linear(4, 5)),
    "a convolution of groups": lambda: seq(nn.Conv2d(6, 4, 1, groups=2), avg(1), flat(), nn.Linear(4, 5)),
    "a maximum of a convolution": lambda: seq(nn.Conv2d(6, 4, 1), maximum(1), flat(), nn.Linear(4, 5)),
    "a norm of the batch": lambda: seq(avg(1), flat(), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 5)),
}


#: Steps of tokens, of patches or of nothing: their sizes are no chain of one sample's features.
OTHER_SIZES = {
    "a batch norm of tokens": lambda: seq(norm1(16), nn.Linear(8, 12)),
    "a batch norm behind a layer of tokens": lambda: seq(nn.Linear(8, 12), norm1(16)),
    "patches": lambda: seq(nn.Conv2d(3, 8, 1), nn.Flatten(2), nn.Linear(49, 12)),
    "a norm of patches": lambda: seq(nn.Flatten(2), norm1(3), nn.Linear(49, 12)),
    "channels that no pool leaves": lambda: seq(nn.Conv2d(8, 6, 1), avg(1), flat(), nn.Linear(8, 5)),
    "a norm that stretches": lambda: seq(flat(), norm1(8), nn.Linear(1, 5)),
    "two linears": lambda: seq(avg(1), flat(), nn.Linear(6, 9), nn.Linear(8, 5)),
}


@pytest.mark.parametrize("make", OTHER_SIZES.values(), ids=OTHER_SIZES)
@pytest.mark.parametrize("training", [False, True])
def test_steps_whose_sizes_are_no_chain_are_left_alone(make, training):
    model = nn.ModuleDict({"mix": make(), "exit": seq(flat(), nn.Linear(9, 10))}).train(training)
    with pytest.raises(ValueError, match="^module: "):
        FusedAuxHead.from_module(model["mix"])
    report = fuse_aux_heads(model)
    assert [*report.replaced] == ["exit"]


def test_a_norm_that_takes_off_more_than_it_leaves_is_folded_in_float32_alone():
    module = seq(avg(1), flat(), norm1(6), nn.Linear(6, 5)).eval()
    module[2].running_mean.fill_(3.0)
    module[2].running_var.fill_(0.01)
    assert FusedAuxHead.from_module(module).linear.weight.dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(ValueError, match="folded in half precision its batch norm would be rounded off"):
            FusedAuxHead.from_module(module.to(dtype))
        module[2].running_mean.zero_()
        assert FusedAuxHead.from_module(module).linear.weight.dtype == dtype
        module[2].running_mean.fill_(3.0)


def test_a_norm_on_meta_is_folded_in_any_dtype():
    """What it takes off is not known there."""
    for dtype in (torch.float32, torch.float16):
        module = FOLDED["batch norm"]().eval().to("meta", dtype)
        assert FusedAuxHead.from_module(module).linear.weight.dtype == dtype


def test_what_is_folded_in_inference_mode_can_be_trained():
    with torch.inference_mode():
        head = FusedAuxHead.from_module(FOLDED["batch norm"]().eval())
    head.logits(torch.randn(MAP)).sum().backward()
    assert head.linear.weight.grad is not None


def test_dtypes_and_layouts_that_no_head_has_are_refused():
    two = seq(avg(1), flat(), nn.Linear(6, 9), nn.Linear(9, 5)).eval()
    sparse, lost = (FOLDED["batch norm"]().eval() for _ in range(2))
    sparse[3].weight = nn.Parameter(sparse[3].weight.detach().to_sparse_csr())
    lost[2].running_var = None
    for module in (two.to(torch.float8_e4m3fn), sparse, lost):
        with pytest.raises(ValueError, match="^module: "):
            FusedAuxHead.from_module(module)


MISPLACED = {
    "before the pool": lambda: seq(drop(0.5), avg(1), flat(), nn.Linear(6, 5)),
    "behind the last layer": lambda: seq(avg(1), flat(), nn.Linear(6, 5), drop(0.5)),
    "before a norm": lambda: seq(flat(), drop(0.5), nn.LayerNorm(6), nn.Linear(6, 5)),
    "before an activation": lambda: seq(flat(), nn.Linear(6, 9), drop(0.5), nn.ReLU(), nn.Linear(9, 5)),
}


def test_a_dropout_alone_is_not_folded_away():
    """It would be lost, and so would be the parameters that a head shares with its module."""
    for make in MISPLACED.values():
        with pytest.raises(ValueError, match="is out of place"):
            FusedAuxHead.from_module(make().eval())


def test_what_is_not_linear_is_refused():
    for make in NOT_LINEAR.values():
        with pytest.raises(ValueError, match="^module: "):
            FusedAuxHead.from_module(make().eval())


def own_forward(part: nn.Module) -> None:
    forward = part.forward
    part.forward = lambda x: forward(x) * 2


#: What users put on layers of a head; the last ones on those with a weight.
ON_ANY = {
    "hook": lambda part: part.register_forward_hook(lambda *said: said[-1] * 2),
    "pre-hook": lambda part: part.register_forward_pre_hook(lambda _, x: (x[0] * 2,)),
    "backward hook": lambda part: part.register_full_backward_hook(lambda *_: None),
    "forward": own_forward,
    "class": lambda part: setattr(part, "__class__", type("Mine", (type(part),), {})),
}
ON_WEIGHTS = {
    "pruning": lambda part: prune.l1_unstructured(part, "weight", 0.5),
    "old weight norm": weight_norm,
    "weight norm": parametrizations.weight_norm,
    "computed": lambda part: (delattr(part, "weight"), setattr(part, "weight", torch.randn(5, 4) * 2)),
}


@pytest.mark.filterwarnings("ignore:.*norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("mode", ["training", "eval"])
@pytest.mark.parametrize("put", [*ON_ANY, *ON_WEIGHTS])
def test_what_users_have_put_on_a_head_stays_on_it(put: str, mode: str) -> None:
    """In eval mode, where such a head could be folded, as in training mode."""
    for place in (6,) if put in ON_WEIGHTS else (None, 0, 1, 2, 3, 5, 6):
        check_what_is_put(put, place, mode)


def check_what_is_put(put: str, place: int | None, mode: str) -> None:
    parts = [nn.Conv2d(6, 4, 1), avg(1), flat(), norm1(4), same(), same(), nn.Linear(4, 5)]
    if mode == "training" or put in ON_WEIGHTS:  # which is no matter of folding
        parts[0], parts[3] = same(), same()
        parts[6] = nn.Linear(6, 5) if put != "computed" else nn.Linear(4, 5)
        parts[0] = nn.Conv2d(6, 4, 1) if put == "computed" else parts[0]
    head = seq(*parts).train(mode == "training")
    assert put in ON_WEIGHTS or FusedAuxHead.from_module(head)
    {**ON_ANY, **ON_WEIGHTS}[put](head if place is None else head[place])
    with pytest.raises(ValueError, match="^module: "):
        FusedAuxHead.from_module(head)
    assert not fuse_aux_heads(nn.ModuleDict({"exit": head})).replaced
    backbone = seq(nn.Conv2d(3, 6, 1), avg(1), flat(), nn.Linear(6, 5))
    x = torch.randn(2, 3, 4, 4)
    network = EarlyExitNetwork(backbone.train(mode == "training"), {"0": head}, example_input=x)
    assert isinstance(network.heads[0], ModuleHead)
    torch.testing.assert_close(network.eval().logits(x)[0], head(backbone[0](x)))


KEPT = {
    "buffer": lambda part: part.register_buffer("classes", torch.arange(5)),
    "parameter": lambda part: part.register_parameter("scale", nn.Parameter(torch.ones(1))),
    "hook of the state": lambda part: part.register_load_state_dict_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("folded", [False, True])
def test_what_users_keep_on_a_head_stays_in_the_model(kept: str, folded: bool) -> None:
    for place in ("", "0", "1", "1.0", "1.1", "1.2"):
        head = seq(avg(1), seq(flat(), norm1(6) if folded else same(), nn.Linear(6, 5))).eval()
        part = head.get_submodule(place)
        KEPT[kept](part)
        model = nn.ModuleDict({"exit": head})
        fuse_aux_heads(model)
        assert part in {*model.modules()}, place


def test_a_state_of_the_layers_that_were_folded_is_none_of_its_own() -> None:
    """Of two Linears the first has the sizes of the folded one, but is not that."""
    module = seq(avg(1), flat(), nn.Linear(6, 5), nn.Linear(5, 5)).eval()
    head, x = FusedAuxHead.from_module(module), torch.randn(MAP)
    state = module.state_dict()
    missing, unexpected = head.load_state_dict({**state, **head.rule.state_dict(prefix="rule.")}, strict=False)
    assert missing == ["linear.weight", "linear.bias"] and set(unexpected) == set(state)
    torch.testing.assert_close(head(x).probs, module(x).softmax(1), rtol=1e-4, atol=1e-5)


def test_a_frozen_head_is_folded_frozen() -> None:
    head = FOLDED["batch norms around a hidden layer"]().eval()
    assert all(each.requires_grad for each in FusedAuxHead.from_module(head).parameters())
    assert not any(each.requires_grad for each in FusedAuxHead.from_module(head.requires_grad_(False)).parameters())


def test_a_layer_in_training_mode_is_not_folded() -> None:
    """A batch norm, say, that goes on counting."""
    head = FOLDED["batch norm"]().eval()
    head[2].train()
    with pytest.raises(ValueError, match="in eval mode it could be folded"):
        FusedAuxHead.from_module(head)
