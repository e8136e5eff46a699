"""Models of HuggingFace's transformers: heads on their layers answer as written out, and all that comes after works."""

import pytest
import torch
from auxhead.model import TrainingPlan, attach, calibrate_network, load_checkpoint, make_runner, save_checkpoint, train
from support.exits_plan_cases import assert_same
from torch import nn

pytest.importorskip("transformers")
from transformers import (  # noqa: E402
    BatchEncoding,
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

pytestmark = pytest.mark.usefixtures("without_interpreter")
CLASSES = 3
SIZES = {"vocab_size": 50, "num_labels": CLASSES}


def bert():
    return BertForSequenceClassification(
        BertConfig(**SIZES, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32)
    )


def distilbert():
    return DistilBertForSequenceClassification(DistilBertConfig(**SIZES, dim=16, n_layers=4, n_heads=2, hidden_dim=32))


MODELS = {"BERT": (bert, "bert.encoder.layer"), "DistilBERT": (distilbert, "distilbert.transformer.layer")}


@pytest.fixture(params=MODELS)
def made(request):
    """The model in eval mode, and the name of its layers."""
    torch.manual_seed(0)
    make, layers = MODELS[request.param]
    return make().eval(), layers


def encoded(*lengths, to=None, seed=0):
    """What a tokenizer returns for sentences of these lengths, padded."""
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randint(1, 50, (max(40, *lengths),), generator=drawn) for _ in lengths])
    mask = (torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None]).long()
    longest = max(lengths) if to is None else to
    return BatchEncoding({"input_ids": (ids * mask)[:, :longest], "attention_mask": mask[:, :longest]})


def written_out(model, net, x):
    """The logits of heads on hidden states and the model's own, in plain PyTorch."""
    hidden = model(**x, output_hidden_states=True).hidden_states[1:]
    mask, logits = x["attention_mask"][..., None], []
    for tap, head in zip(net.taps, net.fused_heads, strict=True):
        y = hidden[int(tap.rpartition(".")[2])]
        y = y[:, 0] if head.pool == "first" else (y * mask).sum(1) / mask.sum(1)
        logits.append(nn.functional.linear(y, head.linear.weight, head.linear.bias))
    return [*logits, model(**x).logits]


@pytest.mark.parametrize("pool", ["first", "avg"])
@torch.no_grad()
def test_answers_are_those_of_the_model_written_out(made, pool, device):
    model, layers = made
    model.to(device)
    example = encoded(9, 4).to(device)
    net = attach(model, [f"{layers}.{index}" for index in range(3)], example_input=example).eval()
    for head in net.fused_heads:
        assert head.pool == "first"
        head.pool = pool
    net.check_taps(example)
    with make_runner(net, example, lengths=(16, 40), plan=None, budget="quick") as runner:
        for lengths in ((9, 4), (3, 16, 2), (31,)):
            wanted = [each.softmax(1).max(1) for each in written_out(model, net, encoded(*lengths).to(device))]
            for to in {max(lengths), max(lengths) + 5, 40}:
                x = encoded(*lengths, to=to).to(device)
                for exit_index, (confidence, label) in enumerate(wanted):
                    net.set_rules({tap: float(place < exit_index) for place, tap in enumerate(net.taps)})
                    for answer in (net(x), net(x, stop=True), runner(x)):
                        assert answer.exit_index.eq(exit_index).all() and answer.label.equal(label)
                        torch.testing.assert_close(answer.confidence, confidence.float(), rtol=1e-4, atol=1e-5)


def test_training_calibration_and_checkpoints(made, tmp_path):
    model, _ = made
    net = attach(model, example_input=encoded(9, 4))

    def batches(first, count):
        return [{**encoded(5, 9, 2, seed=first + place), "labels": torch.arange(3)} for place in range(count)]

    train(net, batches(0, 2), TrainingPlan(epochs=1), validation=batches(50, 1))
    report = calibrate_network(net, batches(100, 20), max_accuracy_drop=0.9)
    assert report.samples["test"] > 10
    save_checkpoint(tmp_path / "saved", net, calibration=report.to_json())
    loaded = load_checkpoint(tmp_path / "saved", type(model)(model.config)).network.eval()
    x = encoded(5, 7)
    with torch.no_grad():
        assert_same(loaded(x), net.eval()(x))


@torch.no_grad()
def test_a_vision_transformer_takes_pictures_alone(device):
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=16, patch_size=8, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32,
        num_labels=CLASSES,
    )  # fmt: skip
    model = ViTForImageClassification(config).eval().to(device)
    x = torch.randn(5, 3, 16, 16, device=device)
    net = attach(model, ["vit.layers.0", "vit.layers.2"], example_input=x).eval()
    assert all(head.pool == "first" for head in net.fused_heads)
    hidden = model(x, output_hidden_states=True).hidden_states
    for head, tap in zip(net.fused_heads, net.taps, strict=True):
        y = hidden[int(tap.rpartition(".")[2]) + 1][:, 0]
        torch.testing.assert_close(net.logits(x)[net.taps.index(tap)], head.linear(y))
    with make_runner(net, x, plan=None, budget="quick") as runner:
        assert_same(runner(x), net(x))
