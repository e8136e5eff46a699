"""A training that was stopped and goes on gives, bit for bit, what one without a stop gives."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from auxhead.model import TrainingPlan, train
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.training.batches import PixelBatches
from auxhead.model.training.training_loop import LossNotFinite
from auxhead.model.training.training_state import TrainingState
from safetensors import safe_open
from safetensors.torch import save_file
from support.trainable import assert_equal_bits, digits, images, part_of, tensors, trainable
from torch.utils.data import DataLoader

pytestmark = pytest.mark.usefixtures("without_interpreter")


class Stopped(Exception):
    pass


def pixels():
    split = part_of(digits()[0], slice(80))
    return PixelBatches(split, 16, device=torch.device("cpu"), seed=5, augment="shift")


def global_loader():
    return DataLoader(images(digits()[0], 80), 16, shuffle=True)


def own_loader():
    return DataLoader(images(digits()[0], 80), 16, shuffle=True, generator=torch.Generator().manual_seed(3))


def in_workers():
    return DataLoader(images(digits()[0], 40), 20, shuffle=True, num_workers=1)


def sgd(parameters):
    *most, last = parameters
    return torch.optim.SGD([{"params": most}, {"params": [last], "lr": 0.01}], lr=0.05, momentum=0.9)


def cosine(optimizer, steps):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


#: Batches, a plan, and whether there are images for validation, by which the best epoch is kept, else the last.
PLANS = {
    "joint": (pixels, TrainingPlan(epochs=4), True),
    "rest": (global_loader, TrainingPlan(epochs=4, accumulate=2), False),
    "average": (pixels, TrainingPlan(epochs=4, ema=0.8), True),
    "average, last": (global_loader, TrainingPlan("distill", epochs=4, ema=0.8, label_smoothing=0.1), False),
    "sgd": (pixels, TrainingPlan(epochs=4, optimizer=sgd, scheduler=cosine), True),
    "one cycle of adam": (pixels, TrainingPlan(epochs=4, optimizer=torch.optim.Adam), False),
    "generator": (own_loader, TrainingPlan("distill", epochs=4), True),
    "float16": (global_loader, TrainingPlan(epochs=4, precision="float16"), True),
    "heads": (global_loader, TrainingPlan("heads", epochs=4), True),
    "heads, last": (global_loader, TrainingPlan("heads", epochs=4), False),
    "workers": (in_workers, TrainingPlan(epochs=3), False),
}


def run(make_batches, plan, *, validation=None, **options):
    network = trainable(dropout=0.2)
    done = train(network, make_batches(), plan, validation=validation, seed=7, **options)
    return network, done


@pytest.mark.parametrize("kind", PLANS)
def test_a_resumed_training_is_the_uninterrupted_one(tmp_path, kind):
    make_batches, plan, validated = PLANS[kind]
    validation = DataLoader(images(digits()[1], 40), 20) if validated else None
    whole, wanted = run(make_batches, plan, validation=validation)

    state, steps = tmp_path / "state.safetensors", []

    def stop(step):
        steps.append(step)
        if step.epoch == 2 and len([one for one in steps if one.epoch == 2]) == 2:
            raise Stopped

    with pytest.raises(Stopped):
        run(make_batches, plan, validation=validation, state=state, on_step=stop)
    torch.manual_seed(99)  # another process has drawn other numbers
    seen = []
    resumed, done = run(make_batches, plan, validation=validation, state=state, resume=True, on_step=seen.append)
    assert {step.epoch for step in seen} == set(range(2, plan.epochs))
    assert done == wanted
    assert_equal_bits(tensors(resumed), tensors(whole))


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_training_goes_on_on_any_device(tmp_path, device, precision):
    """Within rounding: not all algorithms of a GPU repeat their results."""
    state = tmp_path / "state.safetensors"
    plan = TrainingPlan(epochs=4, precision=precision)
    losses = []

    def stop(epoch):
        if epoch.epoch == 1:
            raise Stopped

    for options in ({}, {"state": state, "on_epoch": stop}, {"state": state, "resume": True}):
        network = trainable().to(device)
        validation = DataLoader(images(digits()[1], 40), 20)
        try:
            done = train(network, global_loader(), plan, validation=validation, seed=7, **options)
        except Stopped:
            continue
        assert {tensor.device for tensor in network.parameters()} == {device}
        losses.append([epoch.loss for epoch in done.epochs])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2) and losses[0][0] != losses[0][3]


def a_state(scale):
    learner = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(learner.parameters())
    return TrainingState(learner, optimizer, torch.amp.GradScaler("cpu", init_scale=scale), [])


def test_the_scale_of_losses_and_the_layout_of_moments_come_back(tmp_path):
    """Sums over another layout may round in another way."""
    one, other = a_state(8.0), a_state(2.0)
    one.scaler.scale(one.learner(torch.randn(2, 3, 5, 5)).sum()).backward()
    one.scaler.step(one.optimizer)
    one.save(tmp_path / "state.safetensors", {})
    other.restore(tmp_path / "state.safetensors", {})
    assert other.scaler.get_scale() == 8.0
    weights = one.learner.weight, other.learner.weight
    moments = [each.optimizer.state[weight] for each, weight in zip((one, other), weights, strict=True)]
    for name in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(moments[0][name], moments[1][name]) and moments[0][name].any()
        assert moments[0][name].stride() == moments[1][name].stride()
    assert torch.equal(*weights) and weights[1].is_contiguous(memory_format=torch.channels_last)


@pytest.fixture(scope="module")
def saved(without_interpreter, tmp_path_factory):
    state = tmp_path_factory.mktemp("saved") / "state.safetensors"
    run(pixels, TrainingPlan(epochs=2), state=state)
    return state


def test_a_state_of_other_settings_or_another_network_is_refused_and_one_that_is_done_only_loaded(saved):
    for change, message in (
        ({"accumulate": 2}, "is of a training with accumulate 1, got 2; wants the same"),
        ({"method": "heads"}, "is of a training with method 'joint', got 'heads'"),
        ({"weights": (1.0, 1.0, 2.0)}, "is of a training with weights None"),
    ):
        with pytest.raises(BadInput, match=message):
            run(pixels, TrainingPlan(**{"epochs": 2, **change}), state=saved, resume=True)
    others = pixels()
    others.augment = "none"
    with pytest.raises(BadInput, match="is of a training with augment 'shift', got 'none'; wants the same"):
        train(trainable(), others, TrainingPlan(epochs=2), seed=7, state=saved, resume=True)
    network = trainable(norm=False)
    before = tensors(network)
    with pytest.raises(BadInput, match=r"has none for '.*first.0.bias', wants \[8\], as this network has"):
        train(network, pixels(), TrainingPlan(epochs=2), seed=7, state=saved, resume=True)
    assert_equal_bits(tensors(network), before)
    _, done = run(
        pixels, TrainingPlan(epochs=2), state=saved, resume=True, on_step=lambda step: pytest.fail("trained again")
    )
    assert [epoch.epoch for epoch in done.epochs] == [0, 1]


def rewritten(path, change):
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["auxhead"])
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(facts, found)
    save_file(found, path, {"auxhead": json.dumps(facts)})


DAMAGE = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "empty": lambda path: path.write_bytes(b""),
    "no facts": lambda path: save_file({"x": torch.zeros(2)}, path),
    "newer": lambda path: rewritten(path, lambda facts, _: facts.update(format="auxhead training state 3")),
    "no step": lambda path: rewritten(path, lambda facts, _: facts.pop("step")),
    "no moments": lambda path: rewritten(path, lambda _, found: found.pop("optimizer.1.exp_avg")),
    "no generator": lambda path: rewritten(path, lambda _, found: found.pop("generator.0")),
    "bad generator": lambda path: rewritten(path, lambda _, found: found.update({"generator.0": torch.zeros(3)})),
}


def test_a_state_that_is_damaged_or_not_there_is_told(saved, tmp_path):
    state = tmp_path / "state.safetensors"
    for kind, change in DAMAGE.items():
        shutil.copy(saved, state)
        change(state)
        told = r"state.safetensors: is (damaged|no state of a training, or of another ver)"
        with pytest.raises(BadInput, match=told):
            run(pixels, TrainingPlan(epochs=2), state=state, resume=True)
            pytest.fail(kind)
    with pytest.raises(BadInput, match="no such file, so that there is no training to resume"):
        run(pixels, TrainingPlan(epochs=2), state=tmp_path / "none.safetensors", resume=True)


def test_a_failed_write_leaves_the_last_state(saved, tmp_path, monkeypatch):
    state = tmp_path / "state.safetensors"
    shutil.copy(saved, state)

    def no_space(_tensors, path, _metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("auxhead.model.training.training_state.save_file", no_space)
    with pytest.raises(OSError, match="No space"):
        run(pixels, TrainingPlan(epochs=2), state=state)
    assert state.read_bytes() == saved.read_bytes() and list(tmp_path.iterdir()) == [state]


class Diverging:
    """Batches of the digits, in the third epoch times a value."""

    def __init__(self, value):
        self.value, self.epoch = value, -1

    def __len__(self):
        return 4

    def __iter__(self):
        self.epoch += 1
        for x, labels in zip(*(part.split(16) for part in images(digits()[0], 64).tensors), strict=True):
            yield (x * self.value if self.epoch == 2 else x), labels


@pytest.mark.parametrize(
    ("value", "cause", "validated"),
    [(torch.nan, "batches: the loss", False), (3e38, "learning_rate: got 0.02, with", True)],
    ids=["last", "best"],
)
def test_a_loss_that_is_no_number_keeps_the_best_epoch_to_resume_from(tmp_path, value, cause, validated):
    state, states = tmp_path / "state.safetensors", []
    validation = DataLoader(images(digits()[1], 40), 20) if validated else None
    network, plan = trainable(norm=False), TrainingPlan(epochs=4, learning_rate=2e-2)

    def on_epoch(_epoch):
        states.append(tensors(network))

    with pytest.raises(LossNotFinite, match=f"^{cause}") as failed:
        train(network, Diverging(value), plan, validation=validation, state=state, on_epoch=on_epoch)
    done = failed.value.done
    assert len(done.epochs) == len(states) == 2 and f"as after epoch {done.best + 1}" in str(failed.value)
    assert_equal_bits(tensors(network), states[done.best])

    begun = []
    resumed, slower = trainable(norm=False), replace(plan, learning_rate=1e-3)
    found = train(
        resumed, Diverging(1.0), slower, validation=validation, state=state, resume=True,
        on_step=lambda step: begun.append((step.epoch, tensors(resumed))),
    )  # fmt: skip
    assert begun[0][0] == done.best + 1 and len(found.epochs) == 4
    assert found.epochs[: done.best + 1] == done.epochs[: done.best + 1]
    for name, kept in states[done.best].items():
        torch.testing.assert_close(begun[0][1][name], kept, rtol=0, atol=1e-2)
    assert found.epochs[-1].learning_rate < 1e-3


def test_heads_are_resumed_on_the_backbone_that_made_their_features_alone(tmp_path):
    state, plan = tmp_path / "state.safetensors", TrainingPlan("heads", epochs=1)
    for classifier in (False, True):
        network = trainable()
        network.backbone.requires_grad_(False)
        network.backbone.fc.requires_grad_(classifier)
        train(network, global_loader(), plan, seed=7, state=state)
        train(network, global_loader(), plan, seed=7, state=state, resume=True)
        with torch.no_grad():
            next(network.backbone.parameters()).add_(1.0)
        with pytest.raises(BadInput, match="is of a training with frozen .*; wants the same"):
            train(network, global_loader(), plan, seed=7, state=state, resume=True)
