"""Train, calibrate, save, load, run: real images from the first step to a runner that answers for new ones.

Run it with ``python -m auxhead.model.examples.train_save_load_run``. The images are scikit-learn's handwritten digits.
"""

import tempfile
from collections import OrderedDict

import torch
from auxhead.model import (
    CalibrationReport,
    EarlyExitNetwork,
    FusedAuxHead,
    Preprocessing,
    TrainingPlan,
    calibrate_network,
    load_checkpoint,
    make_runner,
    save_checkpoint,
    train,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = tuple(str(digit) for digit in range(10))
EPOCHS = 10


def make_backbone() -> nn.Module:
    """Return the network without heads. Any module that turns a batch into logits will do, a torchvision ResNet say."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for index, (inputs, outputs, stride) in enumerate([(3, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2)]):
        convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        layers[f"block{index}"] = nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())
    layers["classifier"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, len(CLASSES)))
    return nn.Sequential(layers)


def load_splits(device: str) -> list[tuple[Tensor, Tensor]]:
    """Return images [N, 3, 8, 8], -1 to 1, and labels [N] for training (1,000), calibration (400) and the test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    grey = torch.from_numpy(digits.images).float()[:, None] / 8.0 - 1.0  # [N, 1, 8, 8]
    images, labels = grey.expand(-1, 3, -1, -1).to(device), torch.from_numpy(digits.target).to(device)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).to(device)
    return [(images[part], labels[part]) for part in order.split([1_000, 400, 397])]


def train_exits(network: EarlyExitNetwork, images: Tensor, labels: Tensor) -> None:
    """Train backbone and heads together; any DataLoader of (images, labels) will do."""
    batches = DataLoader(TensorDataset(images, labels), batch_size=50, shuffle=True)
    plan = TrainingPlan("joint", epochs=EPOCHS, learning_rate=3e-3)
    train(network, batches, plan, on_epoch=lambda epoch: print(f"epoch {epoch.epoch + 1}: loss {epoch.loss:.2f} nats"))


def choose_thresholds(network: EarlyExitNetwork, images: Tensor, labels: Tensor) -> CalibrationReport:
    """Set the rules so that early exit costs at most two points of accuracy, as 90 % of all such draws would show."""
    report = calibrate_network(network, [(images, labels)], max_accuracy_drop=0.02, confidence=0.9)
    print(f"calibrated: {report.accuracy:.1%} right, {report.full_accuracy:.1%} if nobody left early")
    return report


def main(device: str) -> None:
    """Go all the way, in a folder that is gone afterwards."""
    torch.manual_seed(0)
    learned, validation, (images, labels) = load_splits(device)
    heads = {tap: FusedAuxHead(None, len(CLASSES)) for tap in ("block1", "block2")}
    network = EarlyExitNetwork(make_backbone().to(device), heads, example_input=images[:2])
    train_exits(network, *learned)
    halves = (0.5, 0.5, 0.5)  # of pixels from 0 to 1, which so become -1 to 1; `auxhead infer` does that to files
    network.preprocessing = Preprocessing(crop=8, resize=8, mean=halves, std=halves)
    report = choose_thresholds(network, *validation)
    before = network(images)

    with tempfile.TemporaryDirectory() as folder:  # in a script of yours, a folder that stays
        # Heads, taps, thresholds and the backbone's parameters; not its code: whoever loads brings the module, and
        # `backbone` says how to make it. The command line can, too, for image files: auxhead infer FOLDER
        # --backbone auxhead.model.examples.train_save_load_run:make_backbone FILES
        made_by = "auxhead.model.examples.train_save_load_run:make_backbone"
        save_checkpoint(
            folder,
            network,
            backbone=made_by,
            classes=CLASSES,
            calibration=report.to_json(),
        )
        loaded = load_checkpoint(folder, make_backbone().to(device))

    # On a GPU the fastest of what is measured on these images, within half a minute; elsewhere the network as it is.
    with make_runner(loaded.network, images[:32]) as runner:
        answer = runner(images)
        print(runner.describe())
    same = (answer.label == before.label) & (answer.exit_index == before.exit_index)
    right = answer.label == labels
    print(f"saved, loaded, run: {same.double().mean().item():.1%} answered as before")
    print(f"test: {len(images)} images, {right.double().mean().item():.1%} right")
    for index, name in enumerate([*loaded.network.taps, "classifier"]):
        left = answer.exit_index == index
        print(f"  {int(left.sum()):>4} images left at {name}, {int((left & right).sum())} of them right")


if __name__ == "__main__":
    main("cuda" if torch.cuda.is_available() else "cpu")
