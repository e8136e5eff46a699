"""Replicas that torch.nn.DataParallel makes: their parameters are plain attributes, and they answer all the same."""

import pytest
import torch
from auxhead.model import EarlyExitNetwork, ExitRule, FusedAuxHead
from support.example_models import SmallNet, plain_heads
from support.hidden_head_cases import with_hidden_heads
from torch import nn
from torch.nn.utils import prune

pytestmark = pytest.mark.usefixtures("without_interpreter")


def replica_of(module: nn.Module) -> nn.Module:
    """Copy a module as ``torch.nn.parallel.replicate`` does, which wants GPUs."""
    replica = module._replicate_for_data_parallel()
    replica._former_parameters = {}
    for name, parameter in module._parameters.items():
        setattr(replica, name, None if parameter is None else parameter.clone())
        replica._former_parameters[name] = parameter
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else replica_of(child)
    return replica


@pytest.mark.parametrize("hidden", [False, True])
def test_a_replica_answers_as_the_network(hidden: bool) -> None:
    x = torch.randn(9, 3, 8, 8)
    net = with_hidden_heads(x)[0] if hidden else EarlyExitNetwork(SmallNet(), plain_heads(), 0.6).eval()
    wanted = net(x)
    with torch.no_grad():
        found = replica_of(net)(x)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_replica_whose_weight_is_made_by_hooks_answers_by_it() -> None:
    head, x = FusedAuxHead(6, 5, rule=ExitRule(0.3)), torch.randn(2, 6)
    prune.l1_unstructured(head.linear, "weight", 20)
    assert torch.equal(replica_of(head)(x).probs, head(x).probs)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_answer_as_one() -> None:
    net, x = EarlyExitNetwork(SmallNet(), plain_heads(), 0.6).cuda().eval(), torch.randn(9, 3, 8, 8, device="cuda")
    wanted = net(x)
    with torch.no_grad():
        found = nn.DataParallel(net, device_ids=[0, 1])(x)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
