"""Training by deep supervision: the small network, the schedule, and a loss that falls."""

import pytest
import torch
from auxhead.model.demo.small_resnet import BLOCKS, resnet18_small, small_early_exit_network
from auxhead.model.training.data_sets import Split
from auxhead.model.training.deep_supervision import TrainingPlan, one_cycle, train

pytestmark = pytest.mark.usefixtures("without_interpreter")


def test_the_small_resnet_keeps_the_resolution_of_a_small_image():
    network = resnet18_small(7).eval()
    with torch.no_grad():
        assert network(torch.zeros(2, 3, 16, 16)).shape == (2, 7)
        early = network.maxpool(network.relu(network.bn1(network.conv1(torch.zeros(1, 3, 16, 16)))))
    assert early.shape == (1, 64, 16, 16)


def test_every_block_has_a_head_and_none_exits():
    network = small_early_exit_network(4).eval()
    assert network.taps == BLOCKS and len(BLOCKS) == 8
    assert (network(torch.randn(3, 3, 16, 16)).exit_index == 8).all()


def small_split():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(16) % 2
    noise = torch.randint(0, 60, (16, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return Split(noise + 150 * labels[:, None, None, None].to(torch.uint8), labels, torch.arange(16))


def trained(seed=0, device="cpu"):
    torch.manual_seed(0)
    network = small_early_exit_network(2).to(device)
    steps = []
    plan = TrainingPlan(epochs=2, batch_size=6, largest_shift=1)
    train(network, small_split(), plan, seed=seed, on_step=steps.append)
    return network, steps


def test_every_exit_learns_and_the_same_seed_gives_the_same_network():
    network, steps = trained()
    assert [step.epoch for step in steps] == [0, 0, 1, 1]  # 16 pictures are two batches of 6
    assert not network.training
    torch.manual_seed(0)
    fresh = small_early_exit_network(2)
    for head, before in zip(network.heads, fresh.heads, strict=True):
        assert not torch.equal(head.linear.weight, before.linear.weight)
    again, _ = trained()
    other, _ = trained(seed=1)
    for name, value in network.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert not torch.equal(network.backbone.fc.weight, other.backbone.fc.weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_on_a_gpu():
    network, steps = trained(device="cuda")
    assert len(steps) == 4 and all(step.loss < 10 for step in steps)
    assert network.backbone.fc.weight.is_cuda


@pytest.mark.parametrize(
    ("images", "epochs", "expected"),
    [(1078, None, 10), (100_000, None, 10), (200, None, 20), (2, None, 100), (1078, 3, 3)],
)
def test_few_images_get_more_epochs(images, epochs, expected):
    plan = TrainingPlan.choose(images, 16, epochs)
    assert plan.epochs == expected and 1 <= plan.batch_size <= images


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 7, 8, 100])
def test_the_learning_rate_rises_to_the_top_and_falls(steps):
    rates = [one_cycle(step, steps) for step in range(steps + 1)]  # the schedule looks one step ahead
    top = rates.index(1.0)
    assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert all(0.0 < rate <= 1.0 for rate in rates[:-1])
