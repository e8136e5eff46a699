"""Parameters of a fused head, saved and loaded as those of the nn.Sequential that it replaces."""

import copy
import io

import pytest
import torch
from auxhead.model import FusedAuxHead
from support.example_models import assert_as_exact, in_double, softmax_of
from support.head_sequentials import ALL, MAP, flat, seq
from torch import nn


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", ALL)
def test_state_dict_goes_both_ways(kind: str) -> None:
    source, other = ALL[kind](), ALL[kind]()
    head = FusedAuxHead.from_module(ALL[kind]())
    assert set(head.state_dict()) == set(source.state_dict())
    head.load_state_dict(source.state_dict())
    other.load_state_dict(head.state_dict())
    for (name, wanted), (_, found) in zip(source.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(wanted, found), name


@pytest.mark.parametrize("kind", ["avg", "no-bias", "nested-deeply", "linear-named-rule", "linear-in-linear", "linear"])
def test_state_dict_goes_both_ways_within_a_model_by_any_way(kind: str) -> None:
    def model(head: nn.Module) -> nn.Module:
        return nn.ModuleDict({"body": nn.Linear(2, 2), "exits": nn.ModuleList([nn.Identity(), head])})

    original = model(ALL[kind]())
    swapped = model(FusedAuxHead.from_module(ALL[kind]()))
    assert set(swapped.state_dict()) == set(original.state_dict())
    swapped.load_state_dict(original.state_dict(), assign=True)
    assert all(torch.equal(a, b) for a, b in zip(original.parameters(), swapped.parameters(), strict=True))
    copied = copy.deepcopy(swapped)
    file = io.BytesIO()
    torch.save(copied.state_dict(), file)
    file.seek(0)
    fresh = model(ALL[kind]())
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(original.parameters(), fresh.parameters(), strict=True))
    with pytest.raises(RuntimeError, match="[Uu]nexpected"):
        swapped.load_state_dict({**original.state_dict(), "exits.1.surplus.weight": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="[Mm]issing"):
        swapped.load_state_dict({k: v for k, v in original.state_dict().items() if not k.startswith("exits.1")})


@pytest.mark.parametrize("in_features", [24, None], ids=["sized", "lazy"])
@pytest.mark.parametrize("root", [True, False], ids=["root", "inside"])
def test_a_head_made_directly_loads_a_sequential(in_features: int | None, root: bool) -> None:
    source = ALL["named-fc"]().eval()
    head = FusedAuxHead(in_features, 5, pool="max", pool_size=2, dropout=0.2).eval()
    if root:
        head.load_state_dict(source.state_dict())
    else:
        nn.ModuleDict({"exit": head}).load_state_dict(nn.ModuleDict({"exit": source}).state_dict())
    x = torch.randn(MAP)
    assert_as_exact(head(x).probs, softmax_of(source, x), softmax_of(in_double(source), x.double()))
    assert head.linear.in_features == 24


def test_the_state_of_a_parametrized_layer_loads_again() -> None:
    head = FusedAuxHead.from_module(seq(flat(), nn.Linear(8, 5)))
    torch.nn.utils.parametrizations.weight_norm(head.linear)
    state = {name: value + 1 for name, value in head.state_dict().items()}
    assert all(name.startswith("1.") for name in state)
    head.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in head.state_dict().items())
    x = torch.randn(2, 8)
    torch.testing.assert_close(head(x).probs, head.logits(x).softmax(1))
