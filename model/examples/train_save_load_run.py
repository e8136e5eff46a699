"""Train, calibrate, save, load, run: real images from the first step to a runner that answers for new ones.

Run it with ``python -m auxhead.model.examples.train_save_load_run``. The images are scikit-learn's digits, shipped in its
package.
"""

import tempfile
from collections import OrderedDict
from pathlib import Path

import torch
import torch.nn.functional as F
from auxhead.model import EarlyExitNetwork, FusedAuxHead, calibrate, load_checkpoint, make_runner, save_checkpoint
from torch import Tensor, nn

CLASSES = tuple(str(digit) for digit in range(10))
SIDE = 8  # pixels, as scikit-learn has them
EPOCHS = 10


def block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Return two convolutions, the first of which may halve height and width."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
    )  # fmt: skip


def make_backbone() -> nn.Module:
    """Return the network without heads; any module will do that turns a batch into logits, a torchvision ResNet say."""
    return nn.Sequential(
        OrderedDict(
            block1=block(3, 32, stride=1),
            block2=block(32, 64, stride=2),
            block3=block(64, 64, stride=1),
            block4=block(64, 128, stride=2),
            classifier=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, len(CLASSES))),
        )
    )


def load_splits(device: str) -> list[tuple[Tensor, Tensor]]:
    """Return images [N, 3, 8, 8] and labels [N] of three splits: 1,000 to learn from, 400 and 397."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    grey = torch.from_numpy(digits.images).float() / 8.0 - 1.0  # [N, 8, 8], -1 to 1
    images = grey[:, None].expand(-1, 3, -1, -1).contiguous()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    parts = order.split([1_000, 400, 397])
    return [(images[part].to(device), torch.from_numpy(digits.target)[part].to(device)) for part in parts]


def train(network: EarlyExitNetwork, images: Tensor, labels: Tensor) -> None:
    """Train backbone and heads together: the loss is the mean of the cross-entropies of all exits."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.05)
    network.train()
    for epoch in range(EPOCHS):
        for batch in torch.randperm(len(images)).to(images.device).split(50):
            exits = network.logits(images[batch])  # [50, 10] of each head and, last, of the classifier
            loss = torch.stack([F.cross_entropy(logits, labels[batch]) for logits in exits]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1} of {EPOCHS}: loss of the last batch {loss.item():.2f} nats")
    network.eval()


@torch.no_grad()
def choose_thresholds(network: EarlyExitNetwork, images: Tensor, labels: Tensor) -> float:
    """Set the rules: samples leave as early as half a point of accuracy on a validation split allows.

    Returns the accuracy there.
    """
    probs = torch.stack(network.logits(images)).softmax(dim=2)  # [exits, N, 10]
    confidence, label = probs.max(dim=2)
    found = calibrate(confidence[:-1], label == labels, max_accuracy_drop=0.005)
    network.set_rules(dict(zip(network.taps, found.thresholds, strict=True)))
    print(f"validation: {found.accuracy:.1%} right, {found.full_accuracy:.1%} if nobody left early")
    return found.accuracy


def main(device: str) -> None:
    """Go all the way, in a folder that is gone afterwards."""
    torch.manual_seed(0)
    learned, validation, (images, labels) = load_splits(device)

    heads = {f"block{number}": FusedAuxHead(None, len(CLASSES)) for number in (1, 2, 3)}
    network = EarlyExitNetwork(make_backbone().to(device), heads, example_input=images[:2])
    train(network, *learned)
    accuracy = choose_thresholds(network, *validation)
    truth = network(images)

    with tempfile.TemporaryDirectory() as folder:
        # Heads, taps, thresholds, names of the classes, and the backbone's parameters. Not its code: whoever loads
        # brings the module, and `backbone` says which.
        save_checkpoint(
            Path(folder), network, backbone=f"{__name__}:make_backbone", classes=CLASSES, image_size=SIDE,
            accuracy={"validation": accuracy},
        )  # fmt: skip
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        print(f"saved: {size / 1e6:.1f} MB in {len(list(Path(folder).iterdir()))} files")
        loaded = load_checkpoint(Path(folder), make_backbone())
    network = loaded.network.to(device)  # it is in eval mode, and its rules are those that were calibrated

    # On a GPU, one graph that skips what nobody needs any more; elsewhere the network as it is.
    exits = "gated" if device == "cuda" else "eager"
    with make_runner(network, images[:1], exits=exits, batch_sizes=(1, 32)) as runner:
        answer = runner(images)

    same = (answer.label == truth.label) & (answer.exit_index == truth.exit_index)
    print(f"loaded, run as {exits!r} on {device}: {same.double().mean().item():.1%} of the answers are those from before")
    right = answer.label == labels
    print(f"test: {len(images)} images, {right.double().mean().item():.1%} right")
    for index, name in enumerate([*network.taps, "classifier"]):
        left = answer.exit_index == index
        share = f"{right[left].double().mean().item():.1%} of them right" if left.any() else "-"
        print(f"  {int(left.sum()):>4} left at {name:<10} {share}")
    first = loaded.classes[int(answer.label[0])]
    print(f"the first image shows a {first}, says the network, and is {answer.confidence[0].item():.1%} sure")


if __name__ == "__main__":
    main("cuda" if torch.cuda.is_available() else "cpu")
