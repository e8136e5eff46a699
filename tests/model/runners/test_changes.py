"""Changes of a network that its graphs would not see: requests and refreshes name them, captures refuse them."""

import copy
from collections.abc import Callable

import pytest
import torch
from auxhead.model import EarlyExitNetwork, ExitRule, make_runner
from support.example_models import SmallNet, branch, mixed_heads, plain_heads
from support.head_plan_cases import Tripled
from support.hidden_head_cases import with_hidden_heads
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

pytestmark = pytest.mark.usefixtures("idle")
X = torch.randn(2, 3, 8, 8)
NETWORKS = {
    "fused": lambda: EarlyExitNetwork(SmallNet(), plain_heads(), 0.5),
    "hidden layers": lambda: with_hidden_heads(torch.randn(33, 3, 8, 8))[0],
    "modules": lambda: EarlyExitNetwork(SmallNet(), mixed_heads(), 0.5),
}


def network_of(kind: str) -> EarlyExitNetwork:
    network = NETWORKS[kind]().eval()
    network.check_taps(X)
    return network


def made(network: EarlyExitNetwork, **options: object) -> Callable:
    return make_runner(network, X, **{"exits": "overlapped", **options})


def elsewhere(tensor: Tensor) -> None:
    tensor.data = tensor.data.clone()


def another(layer: nn.Module, name: str) -> None:
    setattr(layer, name, nn.Parameter(getattr(layer, name).detach().clone()))


def triple(*said: Tensor) -> Tensor:
    return 3 * said[-1]


#: Of a network, each with what is said of it.
OF_A_NETWORK = {
    "heads": (lambda net: setattr(net, "heads", copy.deepcopy(net.heads)), "network: its heads were replaced by other"),
    "the backbone": (
        lambda net: setattr(net, "backbone", copy.deepcopy(net.backbone)),
        "network: its backbone was replaced by another object since the runner was made",
    ),
    "a head": (lambda net: net.heads.__setitem__(0, copy.deepcopy(net.heads[0])), r"heads\['block0'\] was replaced by"),
    "the classifier": (
        lambda net: setattr(net.backbone, "fc", nn.Sequential(net.backbone.fc)),
        "the backbone's 'fc' was replaced by another object",
    ),
    "hooks of the classifier": (
        lambda net: net.backbone.fc.register_forward_hook(triple), "the backbone's 'fc' was given other hooks",
    ),
}  # fmt: skip
#: Of the head at block0, each with what is said of that, by the kind of head.
OF_A_HEAD = {
    "fused": {
        "a criterion": (lambda head: head.rule.assign(ExitRule(0.5, criterion="margin")), "its criterion was changed"),
        "a rule": (lambda head: setattr(head, "rule", ExitRule(0.5)), "its rule was replaced"),
        "a temperature": (
            lambda head: setattr(head.rule, "temperature_tensor", torch.full((), 9.0)), "its temperature_tensor was",
        ),
        "memory of a temperature": (
            lambda head: elsewhere(head.rule.temperature_tensor), "its temperature was given other memory",
        ),
        "memory of a threshold": (
            lambda head: elsewhere(head.rule.threshold_tensor), "its threshold was given other memory",
        ),
        "a layer": (lambda head: setattr(head, "linear", copy.deepcopy(head.linear)), "its linear was replaced by"),
        "a weight": (lambda head: another(head.linear, "weight"), "its weight was replaced"),
        "no bias": (lambda head: setattr(head.linear, "bias", None), "its bias was replaced"),
        "memory of a bias": (lambda head: elsewhere(head.linear.bias), "its bias was given other memory"),
        "hooks of a layer": (
            lambda head: head.linear.register_forward_hook(triple), "its linear was given other hooks since the runner",
        ),
        "hooks": (lambda head: head.register_forward_pre_hook(lambda *said: None), "was given other hooks"),
        "a forward": (lambda head: setattr(head.linear, "forward", torch.sign), "its linear was given another forward"),
        "logits": (lambda head: setattr(head, "logits", torch.sign), "was given another logits"),
        "a class": (lambda head: setattr(head.linear, "__class__", Tripled), "its linear was given another class"),
        "a pruned layer, which has no such parameter": (
            lambda head: prune.identity(head.linear, "weight"), "its weight was replaced by another object",
        ),
        "a pool": (lambda head: setattr(head, "pool", "max"), "its pool was changed"),
    },
    "hidden layers": {
        "stack": (lambda head: setattr(head, "hidden", None), "its hidden was replaced"),
        "layer": (lambda head: setattr(head.hidden, "linear", nn.Linear(8, 17)), "its linear was replaced"),
        "norm": (lambda head: setattr(head.hidden, "norm", nn.LayerNorm(8)), "its norm was replaced"),
        "weight": (lambda head: another(head.hidden.linear, "weight"), "its weight was replaced"),
        "memory of a norm": (lambda head: elsewhere(head.hidden.norm.weight), "its weight was given other memory"),
        "activation": (lambda head: setattr(head.hidden, "activation", "relu"), "its activation was"),
        "ReLU": (lambda head: setattr(head.hidden, "rectifies", False), "its rectifies was changed"),
        "eps": (lambda head: setattr(head.hidden.norm, "eps", 0.5), "its eps was changed"),
    },
    "modules": {
        "hooks": (lambda head: head.module.fc.register_forward_hook(triple), "its .* hooks since the"),
        "forward": (lambda head: setattr(head.module, "forward", torch.sign), "its .* forward since the"),
        "class": (lambda head: setattr(head.module.fc, "__class__", Tripled), "its .* class since the runner was made"),
        "module": (lambda head: setattr(head, "module", branch(8)), "its module was replaced"),
        "layer": (lambda head: setattr(head.module, "conv", nn.Conv2d(8, 6, 3, padding=1)), "its conv was replaced"),
        "memory": (lambda head: elsewhere(head.module.fc.weight), "its weight was given"),
        "statistics": (lambda head: head.module.bn.register_buffer("running_var", torch.ones(6)), "its running_var"),
    },
}  # fmt: skip
CHANGES = [
    *(("fused", name, change, says) for name, (change, says) in OF_A_NETWORK.items()),
    *(
        (kind, name, lambda net, change=change: change(net.heads[0]), rf"heads\['block0'\]:? {says}")
        for kind, changes in OF_A_HEAD.items()
        for name, (change, says) in changes.items()
    ),
]


@pytest.mark.parametrize(("kind", "change", "says"), [(kind, *others) for kind, _, *others in CHANGES],
                         ids=[f"{kind}: {name}" for kind, name, *_ in CHANGES])  # fmt: skip
def test_what_a_graph_no_longer_reads_is_named(kind, change, says):
    """It would answer as it was captured, and nobody would know. One runner stands for all, which share this check."""
    network = network_of(kind)
    runner = made(network)
    runner(X)
    change(network)
    with pytest.raises(RuntimeError, match=f"^{says}"):
        runner(X)


@pytest.mark.parametrize("name", ["rule", "linear"])
def test_a_head_given_another_object_is_refused_until_it_has_its_own_again(name):
    network = network_of("fused")
    runner, head = made(network), network.heads[1]
    own = getattr(head, name)
    setattr(head, name, copy.deepcopy(own))
    with pytest.raises(RuntimeError, match=rf"heads\['block1'\]: its {name} was replaced by another object"):
        runner(X)
    setattr(head, name, own)
    runner(X)


def test_what_was_set_to_what_it_was_is_no_change():
    network = network_of("fused")
    runner = made(network)
    for head in network.heads:
        head.pool_size, head.pool = tuple([*head.pool_size]), "".join([*head.pool])  # other objects
    runner(X)


REFUSED = {
    "parametrized": (
        "fused", lambda head: parametrizations.weight_norm(head.linear),
        "linear is a ParametrizedLinear, which a graph .*eager",
    ),
    "parametrized hidden layers": (
        "hidden layers", lambda head: parametrizations.weight_norm(head.hidden.linear), "hidden.linear is a Parametr",
    ),
    "hooks": ("fused", lambda head: head.register_forward_hook(lambda *said: None), ".*carries hooks, which a graph"),
    "hooks of a layer": (
        "fused", lambda head: head.linear.register_forward_hook(lambda *said: None), ".*carries hooks, which a graph",
    ),
    "a weight that is lazily negated": (
        "fused",
        lambda head: setattr(head.linear, "weight", nn.Parameter(torch._neg_view(-head.linear.weight.detach()))),
        "linear.weight: got a lazily negated",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_head_that_no_graph_can_follow_is_refused_at_once(case):
    """Whoever makes the runner is told, not the first request, and not that something has changed."""
    kind, change, says = REFUSED[case]
    network = network_of(kind)
    change(network.heads[1])
    network.eval()
    with pytest.raises(ValueError, match=rf"^heads\['block1'\]: {says}"):
        made(network)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda net: elsewhere(net.block2[0].weight), "block2.0.weight"),
        (lambda net: another(net.block2[0], "weight"), "block2.0.weight"),
        (lambda net: elsewhere(net.block1[1].running_var), "block1.1.running_var"),
        (lambda net: net.block1[1].register_buffer("running_mean", torch.ones(12)), "block1.1.running_mean"),
    ],
    ids=["moved weight", "other weight", "moved buffer", "other buffer"],
)
def test_a_refresh_refuses_parameters_that_lie_elsewhere(change, name):
    network = network_of("fused")
    runner = made(network)
    runner.refresh()
    change(network.backbone)
    with pytest.raises(RuntimeError, match=f"^network: backbone.{name} was given other memory since the capture"):
        runner.refresh()
