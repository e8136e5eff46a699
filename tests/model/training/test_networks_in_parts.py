"""Networks that lie on several devices: not trained there, but with a backbone that PyTorch shards, and saved whole."""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from auxhead.model import EarlyExitNetwork, TrainingPlan, accuracy_of_exits, train
from auxhead.model.basics.bad_input import BadInput
from support.replica_cases import saved_by_ranks
from support.spawned_sharding import RANKS, WAYS, made, steps, train_sharded
from support.trainable import trainable

pytestmark = pytest.mark.usefixtures("without_interpreter")

INSTEAD = "shard.*torch.distributed.fsdp.fully_shard.*save_checkpoint.*split what load_checkpoint returns"


def in_parts(part: str) -> EarlyExitNetwork:
    network = trainable()
    network.get_submodule(part).to("meta")
    return network


class NeverLookedAt:
    """Batches that nobody may go through."""

    def __len__(self) -> int:
        return 3

    def __iter__(self):
        raise AssertionError("the network is to be refused first")


@pytest.mark.parametrize("method", ["joint", "heads"])
@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("backbone.second", "^network: its backbone.second.0.weight is on meta, and backbone.first.0.weight on cpu; "),
        ("heads.1", "^network: its heads.1.linear.weight is on meta, and backbone.first.0.weight on cpu; "),
        ("", "^network: its backbone.first.0.weight is on meta; wants all of it on one device"),
    ],
    ids=["backbone", "head", "whole"],
)
def test_a_network_in_parts_is_not_trained(tmp_path: Path, part: str, message: str, method: str) -> None:
    network = in_parts(part)
    network.train()
    before = {name: value.clone() for name, value in network.state_dict().items() if not value.is_meta}
    modes, parameters = [module.training for module in network.modules()], [*network.parameters()]
    with pytest.raises(BadInput, match=f"{message}.*{INSTEAD}"):
        train(network, NeverLookedAt(), TrainingPlan(method), state=tmp_path / "state.safetensors")
    assert all(torch.equal(network.state_dict()[name], value) for name, value in before.items())
    assert modes == [module.training for module in network.modules()] and not [*tmp_path.iterdir()]
    assert all(one is other and one.grad is None for one, other in zip(network.parameters(), parameters, strict=True))


def test_a_network_in_parts_is_not_judged() -> None:
    with pytest.raises(BadInput, match=f"^network: its backbone.first.0.weight is on meta; .*{INSTEAD}"):
        accuracy_of_exits(in_parts("backbone.first"), NeverLookedAt())


@pytest.fixture(scope="module")
def found(tmp_path_factory, without_interpreter):
    """What each process found."""
    folder = tmp_path_factory.mktemp("ranks")
    saved = saved_by_ranks(train_sharded, folder, RANKS)
    assert not [*folder.glob("shards*")], "shards are not written"
    return saved


@pytest.mark.parametrize("way", WAYS)
def test_what_was_trained_sharded_is_saved_whole(found, way):
    answer = found[0][way]["answer"]
    assert len(set(answer[-1].tolist())) > 1, "samples leave at several exits"
    for other in (found[1][way]["answer"], found[0][way]["loaded"]):
        assert all(torch.equal(a, b) for a, b in zip(answer, other, strict=True))
    assert found[0][way]["accuracies"] == found[1][way]["accuracies"]


@pytest.mark.parametrize("way", WAYS)
def test_sharded_steps_are_those_of_one_process(found, way):
    network, fresh = made(way), made(way).state_dict()
    steps(way, network, slice(None))
    for name, value in found[0][way]["state"].items():
        torch.testing.assert_close(value, network.state_dict()[name], rtol=1e-3, atol=1e-4)
        if name.endswith("weight"):
            assert torch.equal(value, fresh[name]) == (way == "heads" and name.startswith("backbone")), name


def test_shards_are_neither_trained_by_train_nor_saved(found):
    for each in found:
        assert each["share"] == 8 * 16 * 9 // RANKS
        assert each["train"].startswith("BadInput: network: its backbone.first.0.weight is a DTensor, wants plain")
        assert "joint_loss(network.logits(images), labels).backward()" in each["train"]
        assert each["save"].startswith("TypeError: network: its state 'backbone.first.0.weight' is a DTensor, wants ")
        assert each["save"].endswith("get_model_state_dict")
