"""The loop that trains exits: methods, batches, accumulation, precision, early stopping, random numbers."""

import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from auxhead.model import EarlyExitNetwork, FusedAuxHead, TrainingPlan, accuracy_of_exits, joint_loss, train
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.network.learned_from import FILE, LearnedFrom, Samples, fingerprint, identities, learned_by, short
from auxhead.model.training.batches import PixelBatches
from support.pictures import write_image_folder
from support.trainable import Blocks, assert_equal_bits, digits, images, part_of, tensors, trainable
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
)
from torchvision import transforms
from torchvision.datasets import ImageFolder

pytestmark = pytest.mark.usefixtures("without_interpreter")

CPU = torch.device("cpu")
ZEROS = torch.zeros(2, 3, 8, 8)


def test_what_is_no_number_is_no_right_answer():
    """argmax takes a NaN for the largest."""
    network, x = trainable(), torch.full((4, 3, 8, 8), torch.nan)
    assert accuracy_of_exits(network, [(x, torch.zeros(4, dtype=torch.int64))]) == [0.0] * (len(network.taps) + 1)


def loader(count=96, size=16, **options):
    return DataLoader(images(digits()[0], count), size, **options)


def pixels(device=CPU, seed=0, count=None, size=32):
    split = digits()[0]
    if count:
        split = part_of(split, slice(count))
    return PixelBatches(split, size, device=device, seed=seed, augment="shift")


@pytest.mark.parametrize("method", ["joint", "distill"])
def test_every_exit_learns_the_digits(method, device):
    network = trainable().to(device)
    validation = DataLoader(images(digits()[1]), 128)
    before = accuracy_of_exits(network, validation)
    steps = []
    plan = TrainingPlan(method, epochs=6, learning_rate=2e-2)
    done = train(network, pixels(device), plan, validation=validation, on_step=steps.append)
    found = accuracy_of_exits(network, validation)
    for early, late, least in zip(before, found, (0.6, 0.85, 0.7), strict=True):
        assert late > least > early
    assert done.epochs[done.best].accuracy == tuple(found)
    assert len(steps) == 6 * (1079 // 32) and steps[0].loss > 1.3 * steps[-1].loss
    assert [epoch.epoch for epoch in done.epochs] == list(range(6))
    assert not any(module.training for module in network.modules())


@pytest.mark.parametrize("of_pixels", [False, True])
def test_the_seed_decides_what_is_drawn_and_random_numbers_outside_go_on_as_before(of_pixels):
    def drawn():
        return random.random(), np.random.random(), torch.rand(1).item()

    found, after = [], []
    for seed, trains in ((0, True), (0, False), (0, True), (3, True)):
        network = trainable(dropout=0.2)
        if seed == 0 and len(after) < 2:  # with and without a training between seeding and drawing
            random.seed(1), np.random.seed(1), torch.manual_seed(1)
        if trains:
            batches = pixels(seed=seed, count=64) if of_pixels else loader(shuffle=True)
            train(network, batches, TrainingPlan(epochs=2), seed=seed)
            found.append(tensors(network))
        after.append(drawn())
    assert after[0] == after[1] != after[2]
    assert_equal_bits(found[0], found[1])
    assert not torch.equal(found[0]["heads.0.linear.weight"], found[2]["heads.0.linear.weight"])


def test_the_loop_is_that_of_plain_pytorch():
    """AdamW on the mean of the cross-entropies, with a learning rate a step."""
    batches = list(loader(48))
    network, plain = trainable(), trainable()
    train(network, batches, TrainingPlan(epochs=1, learning_rate=1e-2, weight_decay=0.1))
    plain.train()
    optimizer = torch.optim.AdamW(plain.parameters(), weight_decay=0.1)
    for (x, labels), share in zip(batches, (1.0, 0.75, 0.25), strict=True):
        optimizer.param_groups[0]["lr"] = 1e-2 * share
        optimizer.zero_grad()
        joint_loss(plain.logits(x), labels).backward()
        optimizer.step()
    for name, value in tensors(plain).items():
        torch.testing.assert_close(tensors(network)[name], value, rtol=1e-4, atol=1e-5)


def test_accumulated_batches_are_one_large_one():
    """The rest, four batches of ten, is a step of its own."""
    found = []
    for size, accumulate in ((24, 1), (4, 6)):
        network = trainable(norm=False)
        train(network, list(loader(64, size)), TrainingPlan(epochs=2, accumulate=accumulate), seed=0)
        found.append(tensors(network))
    assert not torch.equal(found[0]["backbone.fc.weight"], trainable(norm=False).backbone.fc.weight)
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("method", ["joint", "heads"])
def test_a_frozen_backbone_stays_bit_for_bit(method):
    """Its batch norms, too; of "heads" the parameters may require gradients."""
    network = trainable()
    network.backbone.requires_grad_(method == "heads")
    before = tensors(network)
    train(network, loader(), TrainingPlan(method, epochs=2))
    for name, value in tensors(network).items():
        assert torch.equal(value, before[name]) == name.startswith("backbone."), name
    assert all(parameter.requires_grad == (method == "heads") for parameter in network.backbone.parameters())
    assert all(parameter.grad is None for parameter in network.parameters())


def test_heads_on_kept_features_learn_what_they_learn_behind_the_backbone():
    """The backbone runs once over the images; the loss is that of the heads alone."""
    found, rates = [], []
    runs = 0

    def count(*_):
        nonlocal runs
        runs += 1

    for method in ("heads", "joint"):
        network = trainable()
        network.backbone.requires_grad_(False)
        hook = network.backbone.register_forward_hook(count)
        runs = 0
        # one batch an epoch, so that no order matters
        done = train(network, list(loader(64, 64)), TrainingPlan(method, epochs=5, learning_rate=1e-2))
        hook.remove()
        found.append(tensors(network))
        rates.append(runs)
        assert done.epochs[0].loss > done.epochs[-1].loss
    assert rates[0] < rates[1]
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-3, atol=1e-4)


def test_heads_alone_are_dropped_out_shuffled_and_validated():
    validation, found, steps = DataLoader(images(digits()[1], 50), 20), [], []
    for dropout in (0.3, 0.0):
        network = trainable(dropout=dropout)
        plan = TrainingPlan("heads", epochs=3)
        done = train(network, loader(100, 30), plan, validation=validation, on_step=steps.append)
        assert done.epochs[done.best].accuracy == tuple(accuracy_of_exits(network, validation))
        found.append(network.heads[0].linear.weight)
    assert [step.images for step in steps] == [30] * 18 and not torch.equal(*found)


def test_features_beyond_memory_are_refused(monkeypatch):
    monkeypatch.setattr("auxhead.model.training.learners.MOST_BYTES", 10_000)
    network = trainable()
    with pytest.raises(ValueError, match="^batches: their features take more than .*take the method 'joint'"):
        train(network, loader(), TrainingPlan("heads"))


@pytest.mark.parametrize("method", ["joint", "heads"])
def test_an_exit_of_weight_0_stays(method):
    network = trainable()
    before = tensors(network)
    weights = (0.0, 1.0) if method == "heads" else (0.0, 1.0, 1.0)
    train(network, loader(), TrainingPlan(method, epochs=1, weights=weights, weight_decay=0.0))
    after = tensors(network)
    assert torch.equal(after["heads.0.linear.weight"], before["heads.0.linear.weight"])
    assert not torch.equal(after["heads.1.linear.weight"], before["heads.1.linear.weight"])


@pytest.mark.parametrize(("precision", "method"), [("bfloat16", "joint"), ("float16", "heads")])
def test_half_precision_learns_with_parameters_in_float32(precision, method):
    found = []
    for each in ("float32", precision):
        network, steps = trainable(), []
        plan = TrainingPlan(method, epochs=3, learning_rate=1e-2, precision=each)
        train(network, loader(64, 32), plan, on_step=lambda step, to=steps: to.append(step.loss.item()))
        assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
        found.append(steps)
    assert found[0] != found[1] and found[1][-1] < found[1][0]
    assert found[1] == pytest.approx(found[0], rel=0.05)


def test_training_stops_where_it_gets_no_better_and_keeps_the_best():
    """It learns wrong labels from the third epoch on."""
    x, labels = images(digits()[0], 64).tensors

    class Spoiled:
        """The digits for two epochs, then labels that are one too large."""

        def __init__(self):
            self.epoch = -1

        def __len__(self):
            return 8

        def __iter__(self):
            self.epoch += 1
            wrong = (labels + (self.epoch > 1)) % 10
            return zip(x.split(8), wrong.split(8), strict=True)

    network, states = trainable(), []
    done = train(
        network, Spoiled(), TrainingPlan(epochs=30, learning_rate=2e-2, patience=3),
        validation=[(x, labels)], on_epoch=lambda _: states.append(tensors(network)),
    )  # fmt: skip
    means = [sum(epoch.accuracy) for epoch in done.epochs]
    assert len(done.epochs) < 30
    assert done.best == means.index(max(means)) == len(done.epochs) - 4
    assert_equal_bits(tensors(network), states[done.best])
    assert not torch.equal(states[-1]["backbone.fc.weight"], states[done.best]["backbone.fc.weight"])


def test_a_loss_that_is_no_number_before_the_first_step_is_not_put_down_to_the_rate():
    network = trainable(norm=False)
    network.backbone.fc.bias.data[0] = 1e5  # more than float16 has
    with pytest.raises(
        BadInput, match="^precision: got 'float16', in which the loss is (nan|inf) in batch 1 of epoch 1"
    ):
        train(network, loader(), TrainingPlan(epochs=1, precision="float16"))
    network.backbone.first[0].weight.data[:] = 3e38
    with pytest.raises(BadInput, match="^network: the loss is (nan|inf) in batch 1 of epoch 1, before anything is"):
        train(network, loader(), TrainingPlan(epochs=1))


class Checkpointed(Blocks):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        y = checkpoint(self.first, x.requires_grad_(), use_reentrant=self.reentrant)
        return self.fc(self.second(y).mean((2, 3)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_reentrant_checkpointing_around_a_tap_warns(reentrant):
    network = EarlyExitNetwork(Checkpointed(reentrant), {"first": FusedAuxHead(8, 10)}, example_input=ZEROS)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(network, [next(iter(loader()))], TrainingPlan(epochs=1))
    about = [str(one.message) for one in found if "reentrant" in str(one.message)]
    assert len(about) == reentrant and all("layer 'first'" in one and "use_reentrant=False" in one for one in about)


class Spoiling(Blocks):
    """Changes the output of its first block in place, in training mode alone."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        y = self.first(x)
        if self.training:
            self.change(y)
        return self.fc(self.second(y).mean((2, 3)))


@pytest.mark.parametrize(
    "change",
    [lambda y: F.dropout(y, 0.5, inplace=True), lambda y: y.flatten(1).mul_(0.5), lambda y: F.relu(y + 0.0, True)],
    ids=["dropout", "view", "of a copy"],
)
def test_a_tap_that_is_changed_in_place_in_training_mode_alone_is_found_before_anything_is_learned(change, request):
    network = EarlyExitNetwork(Spoiling(change), {"first": FusedAuxHead(8, 10)}, example_input=ZEROS)
    if request.node.callspec.id == "of a copy":
        train(network, loader(), TrainingPlan(epochs=1))
        return
    before = tensors(network)
    message = "^heads: the output of layer 'first' is changed in place later .*training mode"
    with pytest.raises(ValueError, match=message):
        train(network, loader(), TrainingPlan(epochs=1))
    assert_equal_bits(tensors(network), before)
    train(network, loader(), TrainingPlan("heads", epochs=1))  # in which the backbone stays in eval mode


@pytest.mark.parametrize("by_batches", [False, True])
def test_samplers_of_several_processes_are_told_the_epoch(by_batches):
    data = images(digits()[0], 48)
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    told = []
    set_epoch = sampler.set_epoch
    sampler.set_epoch = lambda epoch: (told.append(epoch), set_epoch(epoch))
    batches = DataLoader(data, 16, sampler=sampler)
    if by_batches:
        batches = DataLoader(data, batch_sampler=BatchSampler(sampler, 16, drop_last=False))
    train(trainable(), batches, TrainingPlan(epochs=3))
    assert told == [0, 1, 2]


def test_a_folder_of_pictures_by_torchvision(tmp_path):
    """Its transforms draw from the seed, in workers as well."""
    flip = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor()])
    folder = ImageFolder(write_image_folder(tmp_path / "stripes", per_class=6), flip)
    found = []
    for seed, workers in ((0, 0), (0, 0), (1, 0), (0, 1), (0, 1)):
        network = trainable()
        train(network, DataLoader(folder, 4, num_workers=workers), TrainingPlan(epochs=1), seed=seed)
        found.append(tensors(network))
    assert_equal_bits(found[0], found[1])
    assert_equal_bits(found[3], found[4])
    assert not torch.equal(found[0]["backbone.fc.weight"], found[2]["backbone.fc.weight"])


def test_arguments_that_do_not_fit_are_refused():
    (x, labels), lazy = images(digits()[0], 4).tensors, EarlyExitNetwork(Blocks(), {"first": FusedAuxHead(None, 10)})
    three, answer = TrainingPlan("heads", weights=(1.0, 1.0, 1.0)), trainable()(x)
    logits = r"exits: got .*wants logits \[N, K\] .*: network.logits\(x\), not network"
    for call, error, message in (
        (lambda: train(torch.nn.Linear(2, 2), loader()), TypeError, "network: got Linear, wants an EarlyExitNetwork"),
        (lambda: train(trainable(), loader(), three), ValueError, "weights: got .* wants 2"),
        (
            lambda: train(trainable().bfloat16(), loader()),
            TypeError,
            "network: has parameters of torch.bfloat16, wants",
        ),
        (lambda: train(trainable().requires_grad_(False), loader()), ValueError, "network: has no parameter that req"),
        (lambda: train(lazy, loader()), ValueError, r"network: the heads at \['first'\] do not know their width"),
        (lambda: pixels(size=2000), ValueError, "batch_size: got 2000, wants 1 to 1079"),
        (lambda: train(trainable(), loader(), "joint"), TypeError, "plan: got 'joint', wants a TrainingPlan or None"),
        (
            lambda: train(trainable(), images(digits()[0], 4)),
            ValueError,
            r"batches: got labels \[\] .*, as a DataLoader of the data set yields them",
        ),
        (lambda: joint_loss([answer], labels), TypeError, logits),
        (lambda: joint_loss(answer, labels), TypeError, logits),
    ):
        with pytest.raises(error, match=f"^{message}"):
            call()


class Flattened(torch.nn.Module):
    """A classifier that takes its maps as they lie in memory, as a loader's images come."""

    def __init__(self):
        super().__init__()
        self.first, self.fc = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Linear(256, 10)

    def forward(self, x):
        return self.fc(self.first(x).view(len(x), -1))


def test_shifted_pixels_lie_as_those_of_a_loader():
    network = EarlyExitNetwork(Flattened(), {"first": FusedAuxHead(4, 10)}, example_input=ZEROS)
    train(network, pixels(count=64), TrainingPlan(epochs=1))


def test_unshuffled_pixels_are_all_images_in_order():
    split = digits()[1]
    batches = PixelBatches(split, 100, device=CPU)
    found = list(batches)
    assert len(found) == len(batches) == 4
    assert torch.equal(torch.cat([labels for _, labels in found]), split.labels)
    torch.testing.assert_close(torch.cat([x for x, _ in found]), split.pixels / 127.5 - 1.0)


def learned_by_training(batches, plan, validation=None, known=True, **options):
    """What a network, of which is known that it has learned from nothing, has learned from by a training."""
    network = trainable()
    if known:
        network.learned_from = LearnedFrom(None, fingerprint(network))
    train(network, batches, plan, validation=validation, **options)
    assert learned_by(network) == network.learned_from, "of the parameters at the end"
    return network.learned_from


def hashes(*data_sets):
    return {one for each in data_sets for one in short(identities(each.tensors[0])).tolist()}


class Flipped(torch.utils.data.Dataset):
    """Images of a data set, half of them flipped, others each time."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        x, y = self.images[index]
        return (x.flip(2) if torch.rand(()) < 0.5 else x), y


@pytest.mark.parametrize(("epochs", "method"), [(1, "joint"), (3, "joint"), (1, "heads")])
def test_what_was_learned_from_is_noted(epochs, method):
    data, validation = images(digits()[0], 50), images(digits()[1], 30)
    loader = DataLoader(data, 16, shuffle=True, drop_last=True)
    learned = learned_by_training(loader, TrainingPlan(method, epochs=epochs), DataLoader(validation, 15))
    assert learned.unknown is None
    found = set(learned.parts[0].hashes.tolist())
    assert found <= hashes(data, validation) and len(found) >= 48 + 30 - 2, "images may be equal"
    learned = learned_by_training(loader, TrainingPlan(method, epochs=1), known=False)
    assert learned.unknown.startswith("nothing was noted where its parameters come from")


def test_of_several_trainings_what_came_before_is_said_once():
    network, found = trainable(), []
    for method in ("joint", "heads", "joint"):
        train(network, loader(), TrainingPlan(method, epochs=1))
        found.append(network.learned_from.unknown)
    assert found == ["nothing was noted where its parameters come from"] * 3


@pytest.mark.parametrize("epochs", [1, 3])
def test_images_that_are_changed_at_random_are_not_known(epochs):
    data = Flipped(images(digits()[0], 60))
    for batches in (
        DataLoader(data, 20, shuffle=True),
        DataLoader(data, 10, sampler=SubsetRandomSampler(range(20))),
        DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data, num_samples=20), 10, drop_last=False)),
    ):
        assert "changed samples at random" in learned_by_training(batches, TrainingPlan(epochs=epochs)).unknown


def test_samples_of_a_part_of_a_data_set_are_noted():
    data = images(digits()[0], 60)

    class Stream(IterableDataset):
        def __len__(self):
            return 60

        def __iter__(self):
            return iter(data)

    stream = learned_by_training(DataLoader(Stream(), 16, drop_last=True), TrainingPlan(epochs=3))
    assert stream.unknown is None and len(stream.parts[0].hashes) <= 48
    loader = DataLoader(data, 16, sampler=SubsetRandomSampler(range(50)), drop_last=True)
    learned = learned_by_training(loader, TrainingPlan(epochs=3))
    assert learned.unknown is None and set(learned.parts[0].hashes.tolist()) <= hashes(data)


def test_of_images_of_a_command_files_and_pixels_are_noted_without_shifts():
    split = part_of(digits()[0], slice(40))
    batches = PixelBatches(split, 8, device=torch.device("cpu"), seed=0, augment="shift")
    learned = learned_by_training(batches, TrainingPlan(epochs=1))
    (part,) = learned.parts
    assert part.kinds == {FILE} and learned.unknown is None
    assert set(split.contents.flatten().tolist()) < set(part.hashes.tolist())
    inputs = split.preprocessing.normalised(split.pixels)
    roles, _ = learned.roles(Samples([short(identities(inputs))], frozenset(["float32 [3, 8, 8]"])))
    assert (roles == 0).all()


def test_a_resumed_training_has_learned_from_the_same_images_or_says_that_it_does_not_know(tmp_path):
    state, plan = str(tmp_path / "state"), TrainingPlan(epochs=2)

    def stop(epoch):
        raise KeyboardInterrupt

    for make, unknown in ((pixels, None), (loader, "training was resumed, and its samples of before not noted")):
        with pytest.raises(KeyboardInterrupt):
            learned_by_training(make(count=64), plan, state=state, on_epoch=stop)
        if unknown is None:
            split = part_of(digits()[0], slice(64, 128))
            others = PixelBatches(split, 32, device=CPU, seed=0, augment="shift")
            with pytest.raises(BadInput, match="is of a training with images .*; wants the same"):
                learned_by_training(others, plan, state=state, resume=True)
        learned = learned_by_training(make(count=64), plan, state=state, resume=True)
        assert learned.unknown == unknown and len(learned.parts[0].hashes) >= 60
