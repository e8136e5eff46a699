"""ExitRule: numbers on the device, changed in place."""

import copy
import io
import threading

import pytest
import torch
from auxhead.kernels import CRITERIA
from auxhead.model import EarlyExitNetwork, ExitRule, FusedAuxHead
from torch import nn
from torch.optim.swa_utils import AveragedModel


def address(rule: ExitRule) -> tuple[int, int]:
    return rule.threshold_tensor.data_ptr(), rule.temperature_tensor.data_ptr()


def test_defaults_never_exit() -> None:
    rule = ExitRule()
    assert (rule.threshold, rule.temperature, rule.criterion, rule.enabled) == (1.0, 1.0, "max_prob", True)
    head = FusedAuxHead(1, 2)
    torch.nn.init.zeros_(head.linear.weight)
    head.linear.bias = torch.nn.Parameter(torch.tensor([500.0, 0.0]))
    out = head(torch.ones(3, 1))  # the confidence is exactly 1
    assert out.confidence.eq(1).all() and not out.exit.any()


def test_values_reach_the_device(device: torch.device) -> None:
    for threshold in (0.0, 0.1, 0.999999, 0, 1):
        rule = ExitRule(threshold, temperature=2.5).to(device)
        assert rule.threshold == threshold and rule.threshold_tensor.device.type == device.type
        assert rule.threshold_tensor.shape == rule.temperature_tensor.shape == ()
        assert rule.threshold_tensor.item() == torch.tensor(float(threshold)).item()
        assert rule.temperature_tensor.item() == 2.5


def test_assigning_writes_the_same_memory(device: torch.device) -> None:
    rule = ExitRule(0.5).to(device)
    before = address(rule)
    rule.threshold = 0.25
    assert rule.threshold == 0.25 and rule.threshold_tensor.item() == 0.25
    rule.temperature = 3
    assert rule.temperature == 3.0 and rule.temperature_tensor.item() == 3.0
    rule.enabled = False
    assert rule.threshold == 0.25 and rule.threshold_tensor.item() == 1.0
    rule.threshold = 0.75  # remembered, but not in force
    assert rule.threshold == 0.75 and rule.threshold_tensor.item() == 1.0
    rule.enabled = True
    assert rule.threshold_tensor.item() == 0.75
    assert address(rule) == before
    rule.to(device)
    rule.float()
    assert address(rule) == before


def test_a_rule_on_the_meta_device_has_its_values_elsewhere() -> None:
    """As where parameters that were loaded are assigned to a model that was made without memory."""
    with torch.device("meta"):
        made = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 2))
        network = EarlyExitNetwork(made, {"1": FusedAuxHead(4, 2, pool="none", rule=0.25)}).eval()
        rule = ExitRule(0.125)
    state = copy.deepcopy(network).to_empty(device="cpu").state_dict()
    network.load_state_dict(state, assign=True)  # parameters of any values
    assert len(network(torch.ones(3, 4)).label) == 3
    assert network.heads[0].rule.threshold_tensor.item() == 0.25
    assert FusedAuxHead(4, 2, rule=rule, device="cpu").rule.threshold_tensor.item() == 0.125


BAD = {
    "threshold": [-1e-6, 1.0001, float("nan"), float("inf"), -float("inf"), "0.5", True],
    "temperature": [0, -1.0, float("nan"), float("inf"), "1", None, True],
    "enabled": ["no", 0, None],  # which Python takes for a bool
    "criterion": ["entropies", "", None],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_named(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises((ValueError, TypeError), match=f"^{name}: got"):
            ExitRule(**{name: value})
        if name == "criterion":  # of a rule that is made it is what plans and runners compare
            continue
        rule = ExitRule(0.5, temperature=2.0)
        with pytest.raises((ValueError, TypeError), match=f"^{name}: got"):
            setattr(rule, name, value)
        assert values(rule) == ("max_prob", 0.5, 2.0, True) and held(rule) == (0.5, 2.0)


def values(rule: ExitRule) -> tuple[object, ...]:
    return rule.criterion, rule.threshold, rule.temperature, rule.enabled


def test_travels_with_a_state_dict(device: torch.device) -> None:
    source = ExitRule(0.7, temperature=1.3, enabled=False).to(device)
    state = source.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values()) and not list(source.parameters())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    rule = ExitRule(0.5).to(device)
    before = address(rule)
    rule.load_state_dict(torch.load(file, weights_only=True, map_location=device))
    assert values(rule) == values(source) and address(rule) == before
    assert rule.threshold_tensor.item() == 1.0 and rule.temperature_tensor.equal(source.temperature_tensor)
    rule.enabled = True
    assert rule.threshold_tensor.item() == torch.tensor(0.7).item()


@pytest.mark.parametrize(
    ("state", "match"),
    [
        (torch.tensor([0.0, 1.5, 1.0, 1.0]), "threshold: got 1.5"),
        (torch.tensor([0.0, 0.5, 0.0, 1.0]), "temperature: got 0.0"),
        (torch.tensor([0.0, float("nan"), 1.0, 1.0]), "threshold: got nan"),
        (torch.tensor([99.0, 0.5, 1.0, 1.0]), "criterion"),
        (torch.tensor([float("nan"), 0.5, 1.0, 1.0]), "criterion"),
        (torch.tensor([0.0, 0.5]), r"got .*\[2\].*wants"),
        ("sure", "got str, wants"),
    ],
    ids=["threshold", "temperature", "nan", "criterion", "nan-criterion", "short", "no-tensor"],
)
def test_a_bad_rule_of_a_state_dict_is_named_and_changes_nothing(state: object, match: str) -> None:
    head = nn.ModuleDict({"exit": FusedAuxHead(2, 2, rule=ExitRule(0.7, temperature=1.3))})
    with pytest.raises(RuntimeError, match=rf"exit\.rule.*{match}"):
        head.load_state_dict({**head.state_dict(), "exit.rule._extra_state": state})
    assert values(head["exit"].rule) == ("max_prob", 0.7, 1.3, True)


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_casting_a_model_leaves_the_values_exact(cast: str) -> None:
    rule = ExitRule(0.9, temperature=1.1)
    getattr(nn.ModuleList([rule]), cast)()
    assert rule.threshold_tensor.equal(torch.tensor(0.9)) and rule.temperature_tensor.equal(torch.tensor(1.1))


@pytest.mark.parametrize("criterion", CRITERIA)
def test_the_criterion_travels_and_without_a_threshold_no_sample_exits(criterion: str) -> None:
    rule = ExitRule(criterion=criterion)
    assert rule.threshold == rule.threshold_tensor.item() == CRITERIA[criterion].high
    rule = ExitRule(0.25, criterion=criterion, temperature=2.0)
    other = ExitRule()
    other.load_state_dict(rule.state_dict())
    assert (other.criterion, other.threshold, other.temperature) == (criterion, 0.25, 2.0)
    assert other.criterion is ExitRule(criterion=criterion).criterion, "by which plans and runners tell a change"


def held(rule: ExitRule) -> tuple[float, float]:
    return rule.threshold_tensor.item(), rule.temperature_tensor.item()


def loaded(rule: ExitRule) -> ExitRule:
    other = ExitRule()
    other.load_state_dict(rule.state_dict())
    return other


@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_of_models_says_what_its_tensors_hold(use_buffers: bool, device: torch.device) -> None:
    head = FusedAuxHead(2, 3, rule=ExitRule(0.25, temperature=1.0)).to(device)
    averaged = AveragedModel(head, use_buffers=use_buffers)
    averaged.update_parameters(head)
    head.rule.threshold, head.rule.temperature = 0.75, 3.0
    averaged.update_parameters(head)
    rule = averaged.module.rule
    wanted = (0.5, 2.0) if use_buffers else (0.75, 3.0)
    assert (rule.threshold, rule.temperature) == held(rule) == wanted
    assert rule.numbers == tuple(rule.get_extra_state().tolist()) == (0.0, *wanted, 1.0)
    for other in (copy.deepcopy(rule), copy.deepcopy(rule).half(), copy.deepcopy(rule).to("cpu"), loaded(rule)):
        assert (other.threshold, other.temperature) == held(other) == wanted
    rule.enabled = False
    assert (rule.threshold, held(rule)[0]) == (wanted[0], 1.0)


@pytest.mark.parametrize("way", ["copy", "data", "numpy"])
def test_whatever_writes_to_the_tensors_is_what_the_attributes_say(way: str) -> None:
    rule = ExitRule(0.7, temperature=1.1, enabled=False)
    if way == "copy":
        rule.threshold_tensor.copy_(torch.tensor(0.5))
    elif way == "data":
        rule.threshold_tensor.data.copy_(torch.tensor(0.5))
    else:  # as a broadcast, which counts no version up
        rule.threshold_tensor.numpy()[()] = 0.5
    assert (rule.threshold, rule.enabled, rule.temperature) == (0.5, True, 1.1)


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (nn.Parameter(torch.tensor(0.5)), "a parameter"),
        (torch.tensor([0.5]), r"shape \[1\] of torch.float32"),
        (torch.tensor(0.5, dtype=torch.float64), r"shape \[\] of torch.float64"),
        (None, "NoneType"),
    ],
)
def test_tensors_that_attributes_could_not_follow_are_refused(value: object, got: str) -> None:
    rule = ExitRule(0.7)
    with pytest.raises(TypeError, match=f"^threshold_tensor: got {got}, wants a float32 tensor of one number"):
        rule.threshold_tensor = value
    rule.threshold_tensor = torch.tensor(0.25)
    assert (rule.threshold, held(rule)[0]) == (0.25, 0.25)


def test_what_nobody_else_wrote_stays_exact() -> None:
    rule = ExitRule(0.7, temperature=1.1)
    rule.temperature_tensor.fill_(2.0)
    assert (rule.temperature, rule.threshold) == (2.0, 0.7)
    rule.threshold_tensor.fill_(1.0)  # as that of a rule that is not enabled
    assert (rule.threshold, rule.enabled) == (1.0, True)


def test_threads_that_read_and_write_lose_nothing() -> None:
    rule, stop = ExitRule(0.5), threading.Event()
    reader = threading.Thread(target=lambda: [rule.threshold for _ in iter(stop.is_set, True)])
    reader.start()
    try:
        for step in range(300):
            rule.threshold = step / 300
            assert rule.threshold == step / 300
    finally:
        stop.set()
        reader.join()
