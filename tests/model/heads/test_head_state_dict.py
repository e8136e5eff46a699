"""The state_dict of fused heads: parameters under their own names with the exit rules; those of the classifier load."""

import copy
import io
from collections import OrderedDict
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from auxhead.model import EarlyExitNetwork, ExitRule, FusedAuxHead, fuse_aux_heads
from support.example_models import SmallNet, plain_heads
from support.head_sequentials import ALL, HIDDEN, MAP, flat, seq
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim.swa_utils import AveragedModel

#: Whether a head is taken for one that was made directly: of one linear layer see below.
OWN_NAMES = {True: (False,), False: (False, True)}
KINDS = {**ALL, **{f"hidden-{kind}": make for kind, make in HIDDEN.items()}}
#: For states of plain classifiers.
without_rules = pytest.mark.filterwarnings("ignore:state_dict. has no exit rule")


def network() -> EarlyExitNetwork:
    return EarlyExitNetwork(SmallNet(), plain_heads(), ExitRule(0.4, temperature=1.5)).eval()


def in_a_model(head: nn.Module) -> nn.Module:
    return nn.ModuleDict({"body": nn.Linear(2, 2), "exits": nn.ModuleList([nn.Identity(), head])})


@without_rules
@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_the_sequential_it_replaces_loads(kind: str) -> None:
    """Older heads saved themselves in this form, too; and its own state loads, which names each parameter once."""
    for place, assign, own_names in product((lambda head: head, in_a_model), (False, True), OWN_NAMES[kind in ALL]):
        head = FusedAuxHead.from_module(KINDS[kind]())
        if own_names:  # as of one that was made directly
            head._source_paths = {}
        source, fused = place(KINDS[kind]()), place(head)
        fused.load_state_dict(source.state_dict(), assign=assign)
        assert all(map(torch.equal, source.parameters(), fused.parameters()))
    state = head.state_dict()
    assert state.keys() - {"rule._extra_state"} == dict(head.named_parameters()).keys()
    fresh = FusedAuxHead.from_module(KINDS[kind]())
    fresh.load_state_dict(state)
    assert all(map(torch.equal, fresh.parameters(), head.parameters()))


@pytest.mark.parametrize("kind", ["no-bias", "nested-deeply", "linear-in-linear"])
def test_its_own_state_loads_by_any_way(kind: str) -> None:
    swapped, fresh = (in_a_model(FusedAuxHead.from_module(ALL[kind]())) for _ in range(2))
    swapped["exits"][1].rule.threshold = 0.25
    file = io.BytesIO()
    torch.save(copy.deepcopy(swapped).state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(swapped.parameters(), fresh.parameters(), strict=True))
    assert fresh["exits"][1].rule.threshold == 0.25
    state = swapped.state_dict()
    with pytest.raises(RuntimeError, match="[Uu]nexpected"):
        swapped.load_state_dict({**state, "exits.1.surplus.weight": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="[Mm]issing"):
        swapped.load_state_dict({k: v for k, v in state.items() if not k.startswith("exits.1")})


@without_rules
@pytest.mark.parametrize("strict", [True, False])
def test_of_several_linear_layers_none_is_taken_for_its_own(strict: bool) -> None:
    """Which of them would decide the answers nobody has said; the one that has the name it came with is its own."""
    layers = {name: nn.Linear(6, 5) for name in ("first", "second")}
    state = {f"{name}.{key}": value for name, one in layers.items() for key, value in one.state_dict().items()}
    head = FusedAuxHead(6, 5, pool="none")
    before = head.linear.weight.clone()
    if strict:
        with pytest.raises(RuntimeError, match=r'Missing key.*"linear\.weight"'):
            head.load_state_dict(state)
    else:
        missing, unexpected = head.load_state_dict(state, strict=False)
        assert {"linear.weight", "linear.bias"} <= {*missing} and {*unexpected} == {*state}
    assert torch.equal(head.linear.weight, before)
    if not strict:
        named = FusedAuxHead.from_module(nn.Sequential(OrderedDict(second=nn.Linear(6, 5))))
        assert {*named.load_state_dict(state, strict=False).unexpected_keys} == {"first.weight", "first.bias"}
        assert torch.equal(named.linear.weight, layers["second"].weight)


def test_the_state_of_a_parametrized_layer_loads_again() -> None:
    head = FusedAuxHead.from_module(seq(flat(), nn.Linear(8, 5)))
    torch.nn.utils.parametrizations.weight_norm(head.linear)
    state = {name: value + 1 for name, value in head.state_dict().items() if name != "rule._extra_state"}
    older = {name.replace("linear.", "1."): value for name, value in state.items()}
    for form in (state, older):
        with pytest.warns(UserWarning, match="no exit rule"):
            head.load_state_dict(form)
        assert all(torch.equal(value, state[name]) for name, value in head.state_dict().items() if name in state)
    x = torch.randn(2, 8)
    torch.testing.assert_close(head(x).probs, head.logits(x).softmax(1))


def test_a_network_warns_once_of_a_state_without_rules() -> None:
    net = network()
    state = {name: value for name, value in net.state_dict().items() if "rule" not in name}
    with pytest.warns(UserWarning, match="no exit rule.*keep") as caught:
        net.load_state_dict(state)
    assert len({(str(one.message), one.filename, one.lineno) for one in caught}) == 1  # which Python shows once
    assert [(head.rule.threshold, head.rule.temperature) for head in net.heads] == [(0.4, 1.5)] * 3


def test_a_swapped_model_goes_through_a_distributed_checkpoint(tmp_path: Path) -> None:
    def swapped() -> nn.Module:
        model = in_a_model(ALL["nested-deeply"]())
        fuse_aux_heads(model)
        return model

    model, fresh = swapped(), swapped()
    model["exits"][1].rule.threshold = 0.25
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path)
    state = get_model_state_dict(fresh)
    dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(fresh, state)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
    assert fresh["exits"][1].rule.threshold == 0.25


def test_averages_by_name_and_functional_calls() -> None:
    head = FusedAuxHead.from_module(ALL["nested-deeply"](), rule=0.25).eval()
    state = head.state_dict()
    for name, value in head.named_parameters():  # as an exponential moving average keeps its shadow
        state[name].mul_(0.9).add_(value.detach(), alpha=0.1)
    averaged = AveragedModel(head, use_buffers=True)
    averaged.update_parameters(head)
    averaged.update_parameters(head)
    assert averaged.module.rule.threshold == 0.25 and averaged.module.rule.threshold_tensor.item() == 0.25
    x = torch.randn(MAP)
    doubled = {name: value * 2 for name, value in state.items()}
    out = torch.func.functional_call(head, doubled, (x,))
    linear = head.linear
    with torch.no_grad():
        linear.weight.mul_(2), linear.bias.mul_(2)
    assert torch.equal(out.probs, head(x).probs)
