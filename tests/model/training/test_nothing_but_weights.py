"""Training changes weights and what batch norms have seen; a call that fails or is refused changes nothing."""

import pytest
import torch
from auxhead.model import (
    EarlyExitNetwork,
    ExitLatencies,
    FusedAuxHead,
    TrainingPlan,
    attach,
    attach_exits,
    calibrate_network,
    make_runner,
    train,
)
from auxhead.model.basics.bad_input import BadInput
from support.fingerprints import fingerprint, random_numbers
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

pytestmark = pytest.mark.usefixtures("without_interpreter")

X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(6) % 4
GOOD = (X, LABELS)
NESTED = torch.nested.nested_tensor(list(X), layout=torch.jagged)


class Net(nn.Module):
    """Batch norms, a dropout, and a buffer that counts calls."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.5))
        self.fc = nn.Linear(4 * 64, 4)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls = self.calls + 1
        y = self.second(self.first(x))
        return self.fc(y.flatten(1))


def network(*, training=False):
    """One that has been worked on: a hook, a frozen layer, gradients, another memory format, a mode of its own."""
    torch.manual_seed(0)
    backbone = Net().train(training)
    made = EarlyExitNetwork(backbone, {"first": FusedAuxHead(4, 4, dropout=0.1)}, 0.7, example_input=X)
    backbone.second[0].to(memory_format=torch.channels_last)
    backbone.first[0].weight.requires_grad_(False)
    backbone.second[1].train(not training)
    backbone.fc.register_forward_hook(lambda *_: None)
    made.logits(X.clone())[0].sum().backward()
    return made


def interrupted():
    """Batches of which the second is interrupted."""

    class Batches:
        def __len__(self):
            return 3

        def __iter__(self):
            yield GOOD
            raise KeyboardInterrupt

    return Batches()


class Endless(IterableDataset):
    def __iter__(self):
        yield X[0], 0


class OfLength(list):
    def __init__(self, batches, length):
        super().__init__(batches)
        self.length = length

    def __len__(self):
        return self.length


def spoiled(value):
    images = X.clone()
    images[2, 1, 3, 3] = value
    return images, LABELS


def raising(*_):
    raise OSError("full")


JOINT = TrainingPlan("joint", epochs=2)
REFUSED_TRAINING = {
    "iterator": (iter([GOOD]), {}, TypeError, "batches: got list_iterator, whose length is not known"),
    "endless": (DataLoader(Endless(), 1), {}, TypeError, "batches: got DataLoader, whose length is not known"),
    "no batch": ([], {}, ValueError, "batches: got none, wants at least one"),
    "no tensor": ([(X, [0] * 6)], {}, TypeError, "batches: got list for labels"),
    "floats": ([(X, LABELS.float())], {}, TypeError, r"batches: got labels of .*: labels.long\(\), \[N\]"),
    "validation iterator": ([GOOD], {"validation": iter([GOOD])}, TypeError, "validation: got list_iterator"),
    "label": ([GOOD, (X, LABELS + 90)], {}, ValueError, "batches: got label 90, wants 0 to 3"),
    "three parts": (
        [GOOD, (*GOOD, 1)],
        {},
        TypeError,
        r"batches: yields tuple of 3, wants pairs of \(images, labels\)",
    ),
    "by name": (
        [{"y": LABELS, "x": X}],
        {},
        TypeError,
        'batches: .*pairs .*, or a dict with its labels under "labels"$',
    ),
    "ids by name": (
        [{"ids": X, "mask": LABELS[:, None], "label": LABELS}],
        {},
        TypeError,
        ".*unexpected keyword argument 'ids'",
    ),
    "images": ([GOOD, ("x", LABELS)], {}, TypeError, "batches: got str for images"),
    "fewer labels": ([GOOD, (X, LABELS[:2])], {}, ValueError, r"batches: got labels \[2\]"),
    "empty": ([GOOD, (X[:0], LABELS[:0])], {}, ValueError, "batches: batch 2 has no image, wants at least one"),
    "too few": (OfLength([GOOD], 3), {}, ValueError, "batches: yields 1 batches, wants 3, as its length says"),
    "too many": (OfLength([GOOD] * 3, 2), {}, ValueError, "batches: yields more than 2 batches"),
    "channels": ([GOOD, (X[:, :1], LABELS)], {}, RuntimeError, ""),
    "nan": ([GOOD, spoiled(torch.nan)], {}, BadInput, "batches: the loss is nan in batch 2 of epoch 1, whose images"),
    "infinity": ([spoiled(torch.inf)], {}, BadInput, "batches: the loss is nan in batch 1 of epoch 1, whose images"),
    "rate": (
        [GOOD] * 3,
        {"plan": TrainingPlan(learning_rate=1e30)},
        BadInput,
        "learning_rate: got 1e\\+30, with which",
    ),
    "interrupt": (interrupted(), {}, KeyboardInterrupt, ""),
    "on_step": ([GOOD], {"on_step": raising}, OSError, "full"),
    "validation": ([GOOD], {"validation": [(X, LABELS, 0)]}, TypeError, "validation: yields tuple of 3"),
    "validation length": ([GOOD], {"validation": OfLength([GOOD], 2)}, ValueError, "validation: yields 1 batches"),
    "no validation": ([GOOD], {"validation": []}, ValueError, "validation: got none"),
    "weights": ([GOOD], {"plan": TrainingPlan(weights=(1.0,))}, ValueError, "weights: got .* wants 2"),
    "patience": ([GOOD], {"plan": TrainingPlan(patience=1)}, ValueError, "validation: missing"),
    "resume": ([GOOD], {"resume": True}, ValueError, "state: missing"),
    "no state": ([GOOD], {"resume": True, "state": "none"}, BadInput, ".*no such file"),
    "folder": ([GOOD], {"state": "."}, ValueError, "state: .* is a folder, wants a file"),
    "path": ([GOOD], {"state": 3}, TypeError, "state: got int, wants the path of a file"),
    "seed": ([GOOD], {"seed": "0"}, ValueError, "seed: got '0', wants a whole number from 0"),
    "no function": ([GOOD], {"on_epoch": 3}, TypeError, "on_epoch: got int, wants a function"),
    "nothing": (None, {}, TypeError, "batches: got NoneType, .* wants a DataLoader or a list"),
    "sparse": (
        [(X.to_sparse(), LABELS)],
        {},
        TypeError,
        "batches: images: got a torch.sparse_coo tensor",
    ),
    "nested": ([(NESTED, LABELS)], {}, TypeError, "batches: images: got a NestedTensor, wants a dense one"),
    "no folder": ([GOOD], {"state": "none/state"}, ValueError, "state: .*none is no folder"),
}
HEADS = ("label", "too few", "too many", "nan", "interrupt", "validation length")


@pytest.mark.parametrize(
    ("kind", "method"), [*((kind, "joint") for kind in REFUSED_TRAINING), *((kind, "heads") for kind in HEADS)]
)
def test_a_training_that_fails_in_its_first_epoch_changes_nothing(kind, method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    batches, options, error, message = REFUSED_TRAINING[kind]
    if isinstance(options.get("state"), str):
        options = {**options, "state": tmp_path / options["state"]}
    if method == "heads":
        options = {**options, "plan": TrainingPlan("heads")}
        message = message.split(": the loss is")[0]
    net = network()
    before, numbers = fingerprint(net), random_numbers()
    with pytest.raises(error, match=f"^{message}"):
        train(net, batches, **{"plan": JOINT, **options})
    assert fingerprint(net) == before and random_numbers() == numbers


@pytest.mark.parametrize("failing", ["validation", "callback"])
def test_a_training_that_fails_later_leaves_the_best_epoch_so_far(failing):
    """Of the third epoch, which is spoiled; without validation that is the second."""
    wanted, net, states = network(), network(), []
    validation = [GOOD] if failing == "validation" else None
    done = train(wanted, [GOOD] * 2, TrainingPlan(epochs=3), validation=validation, on_epoch=lambda _: None)
    best = min(done.best, 1)

    def on_epoch(epoch):
        states.append([parameter.detach().clone() for parameter in net.parameters()])

    def on_step(step):
        if step.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(net, [GOOD] * 2, TrainingPlan(epochs=3), validation=validation, on_epoch=on_epoch, on_step=on_step)
    assert all(map(torch.equal, net.parameters(), states[best]))
    assert not net.training and net.backbone.second[1].training


@pytest.mark.parametrize(("method", "training"), [("joint", False), ("distill", True), ("heads", True)])
def test_training_changes_weights_and_statistics_alone(method, training):
    net = network(training=training)
    before = fingerprint(net)
    train(net, [GOOD] * 2, TrainingPlan(method, epochs=1), validation=[GOOD])
    after = fingerprint(net)
    learned = {"heads.0.linear"} | (set() if method == "heads" else {"backbone.second.0", "backbone.fc"})
    assert after.pop("learned from") != before.pop("learned from")
    for name, (part, mode, hooks, rule, tensors) in after.items():
        assert (part, hooks, rule) == (before[name][0], *before[name][2:4]), name
        assert mode == (False if training else before[name][1]), "a network in training mode is left to answer"
        for key, tensor in tensors.items():
            was = before[name][4][key]
            if key != "calls":
                assert tensor[:-1] == was[:-1], (name, key)
            if name in learned:
                assert tensor[-1] != was[-1], (name, key)
            elif not (name.endswith(".1") or key == "calls" or name.startswith("backbone.first")) or method == "heads":
                assert tensor == was, (name, key)


def test_a_head_that_shares_a_weight_with_the_backbone_is_not_trained_alone():
    net = network()
    net.backbone.fc = nn.Linear(4, 4)
    net.backbone.forward = lambda x, net=net.backbone: net.fc(net.first(x).mean((2, 3)))
    net.heads[0].linear.weight = net.backbone.fc.weight
    before = fingerprint(net)
    with pytest.raises(ValueError, match=r"^heads\['first'\]: its linear.weight is the backbone's fc.weight, too"):
        train(net, [GOOD], TrainingPlan("heads"))
    assert fingerprint(net) == before
    train(net, [GOOD], JOINT)
    net.heads[0].linear.weight.requires_grad_(False)
    train(net, [GOOD], TrainingPlan("heads", epochs=1))
    net.backbone.fc.bias.data[1] = torch.nan
    with pytest.raises(ValueError, match="^network: its backbone.fc.bias is not all finite numbers"):
        train(net, [GOOD])


@pytest.mark.parametrize(("mode", "method"), [(torch.no_grad, "joint"), (torch.inference_mode, "heads")])
def test_a_training_within_a_mode_without_gradients_learns(mode, method):
    net, other, plan = network(), network(), TrainingPlan(method, epochs=1)
    train(other, [GOOD], plan)
    with mode():
        train(net, [GOOD], plan)
    assert all(map(torch.equal, net.parameters(), other.parameters()))


def test_layers_that_are_no_floats_stay_as_they_are():
    net = network()
    net.backbone.register_buffer("edges", torch.eye(3).to_sparse())
    net.backbone.register_parameter("codes", nn.Parameter(torch.arange(3), requires_grad=False))
    train(net, [GOOD], JOINT)
    assert net.backbone.codes.tolist() == [0, 1, 2] and net.backbone.edges.is_sparse


def test_a_volume_is_learned_from():
    """Five dimensions, of which no parameter can be laid out as channels_last."""
    backbone = nn.Sequential(nn.Conv3d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 2))
    net = EarlyExitNetwork(backbone, {"3": FusedAuxHead(4, 2, pool="none")}).eval()
    done = train(net, [(torch.randn(4, 1, 5, 5, 5), torch.arange(4) % 2)], JOINT)
    assert len(done.epochs) == 2


STATIC = nn.Sequential(nn.Flatten(), nn.Linear(192, 2)).eval()
WORK = {"max_accuracy_drop": None}
REFUSED_CALIBRATION = {
    "mode": ({}, ValueError, "network: its .* is in training mode"),
    "budgets": ({"max_work": 0.5}, ValueError, "max_accuracy_drop, .*: got max_accuracy_drop and max_work, wants"),
    "no budget": ({"max_accuracy_drop": None}, ValueError, "max_accuracy_drop, .*: got none, wants one of"),
    "no work": ({**WORK, "max_work": 0.0}, ValueError, "max_work: got 0.0, wants a share of the backbone's FLOPs in"),
    "work nan": ({**WORK, "max_work": float("nan")}, ValueError, "max_work: got nan, wants a share"),
    "work as text": ({**WORK, "max_work": "half"}, TypeError, "max_work: got 'half', wants a number"),
    "work as bool": ({**WORK, "max_work": True}, TypeError, "max_work: got True, wants a number"),
    "set of indices": ({"train": {1, 2}}, TypeError, "train: got a set with int, wants one of sample_identities"),
    "train beyond": ({"train": [6]}, ValueError, "train: got indices from 6 to 6, wants 0 to 5"),
    "train of floats": ({"train": [0.5]}, TypeError, "train: got torch.float32, wants indices"),
    "train as text": ({"train": "all"}, TypeError, "train: got str, wants indices"),
    "train as dict": ({"train": {}}, TypeError, r"train: got dict, .*; or sample_identities\(loader\), a set, which"),
    "train shape": ({"train": [[1]]}, ValueError, r"train: got shape \[1, 1\], wants \[M\]"),
    "indices for loaders": (
        {"train": [1], "data": {"temperature": [GOOD], "thresholds": [GOOD], "test": [GOOD]}}, TypeError,
        "train: got list, wants a set of sample_identities where data is a dict",
    ),
    "equal samples": (
        {"data": [GOOD, (X[:1], LABELS[:1])], "splits": {"temperature": [0], "thresholds": [1], "test": [6]}},
        ValueError, "splits: temperature and test share 1 samples, such as samples 0 and 6, which",
    ),
    "per cent": ({"max_accuracy_drop": 5}, ValueError, "max_accuracy_drop: got 5, wants a number in"),
    "not measured": (
        {"max_accuracy_drop": None, "max_latency_ms": 1.0},
        ValueError,
        "latencies: got None, wants those of measure_exit_latencies",
    ),
    "other exits": ({"latencies": ExitLatencies((1.0,), 1, "", "")}, ValueError, "latencies: are of 1 exits, wants 2"),
    "images alone": ({"data": [X]}, TypeError, "data: yields Tensor, wants pairs"),
    "two loaders": ({"data": {"test": [], "thresholds": []}}, ValueError, r"data: got splits \['test', 'thresholds'\]"),
    "no such sample": (
        {"splits": {"temperature": [0], "thresholds": [1], "test": [6]}},
        ValueError,
        r"splits\['test'\]: got indices from 6 to 6, wants 0 to 5",
    ),
    "latencies": ({"latencies": 3}, TypeError, "latencies: got int"),
    "confidence": ({"confidence": 2.0}, ValueError, "confidence: got"),
    "seed": ({"seed": 0.5}, TypeError, "seed: got"),
    "static": ({"static_model": nn.Flatten()}, ValueError, "static_model: in training mode"),
    "three parts": ({"data": [(*GOOD, 1)]}, TypeError, "data: yields tuple of 3, wants pairs of input"),
    "label": ({"data": [(X, LABELS + 9)]}, ValueError, "data: got labels from 9"),
    "floats": ({"data": [(X, LABELS.float())]}, ValueError, "data: yields labels"),
    "nan": ({"data": [spoiled(torch.nan)]}, ValueError, "data: the network's logits for it are not all finite"),
    "nothing": ({"data": []}, ValueError, "data: got no batches"),
    "few": ({"data": [(X[:2], LABELS[:2])]}, ValueError, "data: got 2 different samples"),
    "no data": ({"data": None}, TypeError, "data: got NoneType, wants a DataLoader"),
    "twice": (
        {"splits": {"temperature": [0, 1, 0], "thresholds": [2], "test": [3]}},
        ValueError,
        "splits.*sample 0 more",
    ),
    "none": ({"splits": {"temperature": [], "thresholds": [2], "test": [3]}}, ValueError, r"splits.*got shape \[0\]"),
    "static classes": ({"static_model": STATIC}, ValueError, r"static_model: returned .*, wants logits \[6, 4\]"),
    "splits": ({"splits": {"test": [0]}}, ValueError, "splits: got splits"),
    "shared": ({"splits": dict.fromkeys(("temperature", "thresholds", "test"), [0])}, ValueError, "splits: .* share"),
    "train": ({"train": 5}, ValueError, "train: got"),
    "batch": ({"latencies": ExitLatencies((1.0, 2.0), 99, "", "")}, ValueError, "latencies: are of batches of 99"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED_CALIBRATION)
def test_a_refused_calibration_changes_nothing(kind):
    options, error, message = REFUSED_CALIBRATION[kind]
    net = network() if kind == "mode" else network().eval()
    before, numbers = fingerprint(net), random_numbers()
    with pytest.raises(error, match=f"^{message}"):
        calibrate_network(net, **{"data": [GOOD], "max_accuracy_drop": 0.5, **options})
    assert fingerprint(net) == before and random_numbers() == numbers


REFUSED_RUNNERS = {
    "mode": ({}, ValueError, "network: its .* is in training mode"),
    "graph": ({"exits": "polled"}, ValueError, "example_input: on cpu, wants a CUDA device"),
    "channels": ({"example_input": X[:, :1], "exits": "eager", "trunk": "fused"}, (ValueError, RuntimeError), ""),
}
REFUSED_ATTACHING = {
    "no layer": ({"taps": ["third"]}, ValueError, "heads: the backbone has no layer 'third'"),
    "order": ({"taps": ["second", "first"]}, ValueError, "heads: the taps .* are out of order"),
    "in place": ({"taps": ["first.1"]}, ValueError, "heads: the output of layer 'first.1' is changed in place"),
    "classes": ({"num_classes": 7}, ValueError, "num_classes: got 7, wants 4, as the model has"),
    "extract": ({"taps": ["first"], "extract": {"second": 1}}, ValueError, "extract: 'second' is not a tap"),
    "part": ({"taps": ["first"], "logits": 1.5}, (TypeError, ValueError), ""),
    "channels": ({"example_input": X[:, :1]}, ValueError, "example_input: the model could not take it"),
}


@pytest.mark.parametrize(
    ("call", "kind"),
    [*((make_runner, kind) for kind in REFUSED_RUNNERS), *((attach, kind) for kind in REFUSED_ATTACHING)],
)
def test_a_refused_runner_or_attach_changes_nothing(call, kind):
    options, error, message = (REFUSED_RUNNERS if call is make_runner else REFUSED_ATTACHING)[kind]
    net = network(training=kind in ("order", "classes") or call is attach and kind == "channels")
    if call is attach:
        net = net.backbone
        net.first[2].inplace = True
    elif kind != "mode":
        net.eval()
    before, numbers = fingerprint(net), random_numbers()
    with pytest.raises(error, match=f"^{message}"):
        call(net, **{"example_input": X, **options})
    assert fingerprint(net) == before and (call is attach or random_numbers() == numbers)


class Twice(Net):
    """Two exits, of which the second may use what the first says."""

    def __init__(self, used):
        super().__init__()
        self.early, self.used = nn.Linear(4, 4), used

    def forward(self, x):
        y = self.first(x)
        early = self.early(y.mean((2, 3)))
        late = self.fc(self.second(y).flatten(1))
        return [early, late + early if self.used else late]


@pytest.mark.parametrize(
    ("make", "example", "rules", "error"),
    [
        (lambda: Twice(True).eval(), X, None, ValueError),
        (lambda: Twice(False), X, None, ValueError),
        (lambda: Net().eval(), X, None, ValueError),
        (lambda: Twice(False).eval(), X[:, :1], None, RuntimeError),
        (lambda: Twice(False).eval(), X, {"nowhere": 0.5}, ValueError),
    ],
    ids=["used", "training", "one exit", "channels", "rules"],
)
def test_refused_exits_change_nothing(make, example, rules, error):
    model = make()
    before, numbers = fingerprint(model), random_numbers()
    with pytest.raises(error):
        attach_exits(model, example, **({} if rules is None else {"rules": rules}))
    assert fingerprint(model) == before and random_numbers() == numbers
