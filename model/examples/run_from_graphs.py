"""Run from graphs: the same network by each runner, timed on the GPU where images leave early and where none does.

Run it with ``python -m auxhead.model.examples.run_from_graphs``. CUDA graphs need a GPU; without one the eager runner
answers, as it does anywhere.
"""

from statistics import median

import torch
import torchvision
from auxhead.model import EarlyExitNetwork, FusedAuxHead, Runner, make_runner
from torch import Tensor

TAPS = ("layer1", "layer2", "layer3")
#: Ways to run; ``help(auxhead.model.make_runner)`` says what each does.
GRAPHS = ("overlapped", "polled", "gated", "auto")


def device_us(runner: Runner, images: Tensor, requests: int = 100) -> float:
    """Return the median time of a request in microseconds, between two events that the GPU passes."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(requests + 1)]
    for _ in range(10):  # the first requests find cold caches and a GPU that has slowed down
        runner(images)
    events[0].record()
    for event in events[1:]:
        runner(images)
        event.record()
    torch.cuda.synchronize()
    return median(1000.0 * one.elapsed_time(next_one) for one, next_one in zip(events, events[1:], strict=False))


def main(device: str) -> None:
    """Make a network and its runners, and print what each answers and takes."""
    # On a GPU a size at which early exit pays; on a CPU half precision and large images would only be slow.
    dtype, side = (torch.float16, 224) if device == "cuda" else (torch.float32, 64)
    torch.manual_seed(0)
    images = torch.randn(1, 3, side, side).to(device, dtype)
    backbone = torchvision.models.resnet18(num_classes=10).to(device, dtype).eval()
    heads = {tap: FusedAuxHead(None, num_classes=10) for tap in TAPS}  # None: the width comes from the example
    network = EarlyExitNetwork(backbone, heads, example_input=images)

    if device != "cuda":
        with make_runner(network, images) as runner:
            answer = runner(images)
            print(runner.describe())
        print(f"on {device}: label {answer.label.item()}, exit {answer.exit_index.item()} of 0 to 3")
        return

    print(f"ResNet-18, {len(TAPS)} heads, one {side}x{side} image in float16 on {torch.cuda.get_device_name()}")
    print(f"{'exits=':<12} {'nobody leaves':>14} {'all leave at layer2':>20}   (device time of a request, us)")
    truth = make_runner(network, images, exits="eager")
    for exits in GRAPHS:
        times = []
        # A runner is captured once and closed by `with`. Rules may change meanwhile: nothing is captured again. But
        # "auto" measured for the rules that it found, so make it under those that you will use.
        network.set_rules({"layer2": 0.0})
        # It measures trunks, too, and so needs none named; it is what you get without options.
        with make_runner(network, images, exits=exits, trunk=None if exits == "auto" else "cudnn") as runner:
            # The parameters are random, so that no head is ever sure. Here the rule says who leaves: a confidence is
            # never above 1.0 and always above 0.0. Your thresholds come from `auxhead.model.calibrate_network`.
            for threshold, wanted in ((1.0, 3), (0.0, 1)):
                network.set_rules({"layer2": threshold})
                answer = runner(images)
                assert answer.exit_index.item() == truth(images).exit_index.item() == wanted
                times.append(device_us(runner, images))
            print(f"{exits:<12} {times[0]:>14,.0f} {times[1]:>20,.0f}")
            if exits == "auto":
                print(runner.describe())


if __name__ == "__main__":
    main("cuda" if torch.cuda.is_available() else "cpu")
