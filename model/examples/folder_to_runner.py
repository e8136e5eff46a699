"""From a folder of images, one folder a class, to a calibrated runner, with a network of torchvision.

Run it with ``python -m auxhead.model.examples.folder_to_runner FOLDER``.
"""

import sys

import torch
import torchvision
from auxhead.model import Preprocessing, TrainingPlan, attach, calibrate_network, make_runner, save_checkpoint, train
from torch.utils.data import DataLoader, random_split


def main(folder: str, device: str, pixels: int = 64, epochs: int = 10) -> None:
    """Attach heads, train them with the network, choose their thresholds, save it all, and answer."""
    preprocessing = Preprocessing(crop=pixels, resize=pixels)  # of weights: Preprocessing.of_weights(...)
    images = torchvision.datasets.ImageFolder(folder, preprocessing.pipeline())
    parts = random_split(images, [0.6, 0.1, 0.3], torch.Generator().manual_seed(0))
    learned, best_epoch, held_out = (DataLoader(part, batch_size=32, shuffle=part is parts[0]) for part in parts)

    backbone = torchvision.models.resnet18(num_classes=len(images.classes)).to(device)
    network = attach(backbone, example_input=next(iter(held_out))[0].to(device))
    network.preprocessing = preprocessing  # goes with it into files, so that `auxhead infer` does the same
    print(network.describe())  # where the heads are, and behind which share of the work
    train(network, learned, TrainingPlan("joint", epochs=epochs), validation=best_epoch)
    # train=set(): the backbone began at random, and nothing was learned from but what `train` has noted by itself
    report = calibrate_network(network, held_out, max_accuracy_drop=0.05, train=set())
    print(report)
    save_checkpoint(
        "my-network",
        network,
        classes=images.classes,
        calibration=report.to_json(),
    )

    request = next(iter(held_out))[0].to(device)
    with make_runner(network, request) as runner:
        answer = runner(request)  # label, confidence, probs, exit_index: of each image
        print(runner.describe())
        print([images.classes[label] for label in answer.label[:5].tolist()], answer.exit_index[:5].tolist())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m auxhead.model.examples.folder_to_runner FOLDER, with a folder of images a class")
    main(sys.argv[1], "cuda" if torch.cuda.is_available() else "cpu")
