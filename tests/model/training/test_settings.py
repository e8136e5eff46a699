"""Settings of a training: weights by depth, averages, optimizers and classifiers of one's own; refusals."""

import pytest
import torch
from auxhead.model import TrainingPlan, accuracy_of_exits, joint_loss, train
from auxhead.model.basics.bad_input import BadInput
from support.trainable import digits, images, tensors, trainable
from torch.utils.data import DataLoader

pytestmark = pytest.mark.usefixtures("without_interpreter")


def loader(count=96, size=16, **options):
    return DataLoader(images(digits()[0], count), size, **options)


def losses_of(plan):
    """Of each epoch."""
    network = trainable()
    return [epoch.loss for epoch in train(network, loader(shuffle=True), plan, seed=3).epochs], network


def test_an_average_is_kept_and_the_training_is_the_same():
    """Of parameters and buffers: the formula, step by step; and exits are validated by it."""
    network, decay, steps = trainable(), 0.9, []

    def keep(_):
        steps.append({name: value.detach().clone() for name, value in tensors(network).items()})

    before = {name: value.clone() for name, value in tensors(network).items()}
    validation = [next(iter(loader()))]
    plan = TrainingPlan(epochs=2, ema=decay)
    done = train(network, loader(shuffle=True), plan, validation=validation, seed=3, on_step=keep)
    assert [epoch.loss for epoch in done.epochs] == losses_of(TrainingPlan(epochs=2))[0]
    until = (done.best + 1) * len(steps) // 2
    for name, value in tensors(network).items():
        wanted = before[name].clone()
        for step, now in enumerate(steps[:until], 1):
            share = 1.0 - min(decay, (1 + step) / (10 + step))
            wanted = wanted.lerp(now[name], share) if value.is_floating_point() else now[name]
        torch.testing.assert_close(value, wanted)
    assert done.epochs[done.best].accuracy == tuple(accuracy_of_exits(network, validation))
    assert any(not torch.equal(value, steps[until - 1][name]) for name, value in tensors(network).items())


def test_a_linear_layer_that_gives_no_logits_is_no_new_classifier():
    network = trainable()
    network.backbone.requires_grad_(False)
    network.backbone.fc = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 10).requires_grad_(False))
    with pytest.raises(ValueError, match="^network: of the backbone one linear layer alone requires gradients, and is"):
        train(network, loader(), TrainingPlan("heads", epochs=1))


def test_an_optimizer_and_a_schedule_of_ones_own():
    """As a loop of PyTorch alone."""
    batches = list(loader())
    plan = TrainingPlan(
        epochs=2, optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05, 0.9),
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.PolynomialLR(optimizer, steps),
    )  # fmt: skip
    network, alone = trainable(), trainable()
    done = train(network, batches, plan)
    optimizer = torch.optim.SGD(alone.parameters(), 0.05, 0.9)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, 12)
    alone.train()
    for x, labels in batches * 2:
        optimizer.zero_grad()
        joint_loss(alone.logits(x), labels).backward()
        optimizer.step()
        scheduler.step()
    for one, other in zip(tensors(network).values(), tensors(alone).values(), strict=True):
        torch.testing.assert_close(one, other)
    assert [epoch.learning_rate for epoch in done.epochs] == pytest.approx([0.025, 0.0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "sgd"}, "optimizer: got str, wants a function that makes one, or None"),
        ({"optimizer": torch.optim.SGD, "learning_rate": 0.1}, "learning_rate: got 0.1 beside an optimizer, which has"),
        ({"scheduler": lambda *_: None}, "scheduler: made NoneType, wants a torch.optim.lr_scheduler.LRScheduler"),
        ({"label_smoothing": 1.0}, "label_smoothing: got 1.0, wants a number from 0, smaller than 1"),
        ({"ema": 1}, "ema: got 1, wants a number from 0, smaller than 1"),
        ({"ema": "0.9"}, "ema: got '0.9', wants a number"),
        ({"gradients": "linear"}, "gradients: got 'linear', wants one of 'equal', 'depth'"),
        ({"gradients": "depth", "method": "heads"}, "gradients: got 'depth' for the method 'heads', whose backbone is"),
        ({"gradients": "depth", "weights": (1.0, 2.0)}, r"weights: got \(1.0, 2.0\) beside the gradients 'depth'"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        train(trainable(), loader(), TrainingPlan(epochs=1, **settings))


def test_what_cannot_be_saved_is_named(tmp_path):
    plan = TrainingPlan(epochs=1, optimizer=lambda parameters: torch.optim.SGD(parameters, torch.tensor(0.05)))
    with pytest.raises(TypeError, match="^state: the optimizer or scheduler cannot be saved .Object of type Tensor"):
        train(trainable(), loader(), plan, state=tmp_path / "state")


def test_depth_is_weights_in_the_order_of_the_exits():
    by_name, by_hand = (
        losses_of(TrainingPlan("distill", epochs=2, **how))[0]
        for how in ({"gradients": "depth"}, {"weights": (1.0, 2.0, 3.0)})
    )
    assert by_name == by_hand


def test_images_that_are_no_numbers_are_named_with_a_new_classifier_too():
    network = trainable()
    network.backbone.requires_grad_(False)
    network.backbone.fc.requires_grad_(True)
    x, labels = next(iter(loader()))
    x[0, 0, 0, 0] = torch.nan
    with pytest.raises(BadInput, match="^batches: images of batch 1 are not all finite numbers"):
        train(network, [(x, labels)], TrainingPlan("heads", epochs=1))
