"""The steps of "From t1 + t2 to max(t1, t2)": ResNet-18 with a head on every BasicBlock, from in line to real exits.

Each step differs from the one before in a few lines of its ``forward``. It turns images [N, 3, H, W] into probabilities
[N, K]: of the eight heads and, last, of the classifier. Steps 8 to 10 are runners, which answer with an ``ExitResult``.
"""

from collections.abc import Mapping

import torch
from auxhead.model import EarlyExitNetwork, Runner, make_runner
from torch import Tensor, nn
from torchvision.models import ResNet, resnet18

#: The eight BasicBlocks by name, in the order in which they run.
TAPS = tuple(f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1))


def make_parts(pixels: int = 224, classes: int = 10) -> tuple[ResNet, dict[str, nn.Sequential]]:
    """Return a ResNet-18 and, by tap, a head for each of its blocks; ``pixels`` is a multiple of 32."""
    heads = {}
    for index, tap in enumerate(TAPS):
        scale = 2 ** (index // 2)  # each stage has twice the channels, at half the height and width
        features = (64 * scale) * (pixels // (4 * scale)) ** 2  # of the block's output, flattened
        heads[tap] = nn.Sequential(nn.Flatten(), nn.Linear(features, classes), nn.Softmax(dim=1))
    return resnet18(weights=None, num_classes=classes).eval(), heads


class InLine(nn.Module):
    """Step 1: a block, its head, the next block. All on one stream, so the time is t1 + t2."""

    def __init__(self, backbone: ResNet, heads: Mapping[str, nn.Module]) -> None:
        super().__init__()  # layers are shared: all steps have the same parameters
        self.stem = nn.Sequential(backbone.conv1, backbone.bn1, backbone.relu, backbone.maxpool)
        self.blocks = nn.ModuleList(backbone.get_submodule(tap) for tap in heads)
        self.heads = nn.ModuleList(heads.values())
        self.pool, self.fc = backbone.avgpool, backbone.fc

    def classify(self, x: Tensor) -> Tensor:
        """Return the classifier's probabilities for the output of the last block."""
        return self.fc(self.pool(x).flatten(1)).softmax(dim=1)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Run every head between its block and the next one."""
        answers = []
        x = self.stem(x)
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            answers.append(head(x))
        return [*answers, self.classify(x)]


class ReturningEarly(InLine):
    """Step 2: stop at the first head that is sure. The host now waits for the GPU at every head to find out."""

    threshold = 0.9

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the answers up to the first one that is sure of every image."""
        answers = []
        x = self.stem(x)
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            answers.append(head(x))
            least_sure = answers[-1].amax(dim=1).min()
            if least_sure.item() > self.threshold:  # the host stands still here, until all before has run
                return answers
        return [*answers, self.classify(x)]


class Independent(InLine):
    """Step 3: no block waits for a head any more. Still t1 + t2: a stream runs its kernels one after another.

    Autograd knows that no block needs the answer of a head, and so do you. The GPU gets kernels in a queue, and all of
    these are in the same one.
    """

    def forward(self, x: Tensor) -> list[Tensor]:
        """Run all blocks, and then all heads."""
        outputs = []
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        answers = [head(y) for head, y in zip(self.heads, outputs, strict=True)]
        return [*answers, self.classify(x)]


class StreamsLeftOut(InLine):
    """Step 4, wrong: a stream is made, and waits; the heads are launched outside of its context all the same."""

    def __init__(self, backbone: ResNet, heads: Mapping[str, nn.Module]) -> None:
        super().__init__(backbone, heads)
        self.side = torch.cuda.Stream()

    def forward(self, x: Tensor) -> list[Tensor]:
        """Run everything on the default stream."""
        answers = []
        x = self.stem(x)
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            self.side.wait_stream(torch.cuda.current_stream())
            answers.append(head(x))  # on the current stream, which is the default one
        return [*answers, self.classify(x)]


class StreamClass(StreamsLeftOut):
    """Step 4, wrong in another way: the class ``torch.cuda.Stream`` makes one more stream, and nothing waits for it."""

    def forward(self, x: Tensor) -> list[Tensor]:
        """Run the heads somewhere, in no order."""
        answers = []
        x = self.stem(x)
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.Stream(self.side):  # meant is torch.cuda.stream(self.side)
                answers.append(head(x))
        torch.cuda.current_stream().wait_stream(self.side)
        return [*answers, self.classify(x)]


class StreamsRight(StreamsLeftOut):
    """Step 5: the heads run on the side stream, after their block, and beside the next one where there is room."""

    def forward(self, x: Tensor) -> list[Tensor]:
        """Fork a head off after every block, and join them all at the end."""
        trunk = torch.cuda.current_stream()
        answers, held = [], []
        x = self.stem(x)
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            held.append(x)  # if it were freed here, the next block could write over what the head still reads
            self.side.wait_stream(trunk)  # for the block; the stream waits, not the host
            with torch.cuda.stream(self.side):
                answers.append(head(x))
        last = self.classify(x)
        trunk.wait_stream(self.side)  # whoever reads the answers does so on this stream
        for answer in answers:
            answer.record_stream(trunk)  # they are the side stream's memory, which must not use it again before that
        return [*answers, last]


class Priorities(StreamsRight):
    """Step 6: where both have work, the trunk's goes first: a stream with a lower number has the higher priority."""

    def __init__(self, backbone: ResNet, heads: Mapping[str, nn.Module]) -> None:
        super().__init__(backbone, heads)
        self.trunk = torch.cuda.Stream(priority=-1)  # that of the default stream is 0, the lowest there is

    def forward(self, x: Tensor) -> list[Tensor]:
        """Run step 5 on the stream of high priority."""
        caller = torch.cuda.current_stream()
        self.trunk.wait_stream(caller)
        with torch.cuda.stream(self.trunk):
            answers = super().forward(x)
        caller.wait_stream(self.trunk)
        for answer in answers:
            answer.record_stream(caller)
        return answers


class Graphs(nn.Module):
    """Step 7: all launches of a step become one, so that the GPU no longer waits for Python."""

    def __init__(self, step: nn.Module, images: Tensor) -> None:
        """Capture a step, on a stream of high priority, for batches like this one."""
        super().__init__()
        self.step, self.images = step, images.clone()  # a graph reads and writes the same memory each time
        stream = torch.cuda.Stream(priority=-1)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(3):  # libraries make handles and pick algorithms, which no capture may hold
                step(self.images)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph, stream=stream):
            self.answers: list[Tensor] = step(self.images)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Replay the graph; the answers are valid until the next call."""
        self.images.copy_(x)
        self.graph.replay()
        return self.answers


def one_launch_a_head(backbone: ResNet, heads: Mapping[str, nn.Module], images: Tensor) -> Runner:
    """Return step 8: every head is one kernel, beside the trunk, and all of it one graph."""
    network = EarlyExitNetwork(backbone, heads, 1.0, example_input=images)  # no confidence is above 1.0
    return make_runner(network, images, exits="overlapped")


def shorter_trunk(backbone: ResNet, heads: Mapping[str, nn.Module], images: Tensor) -> Runner:
    """Return step 9: most of t2 is hidden, and t1 is left; convolution, norm and ReLU become one kernel."""
    network = EarlyExitNetwork(backbone, heads, 1.0, example_input=images)
    return make_runner(network, images, exits="overlapped", trunk="cudnn")


def real_exits(
    backbone: ResNet, heads: Mapping[str, nn.Module], images: Tensor, rules: float | dict[str, float] = 0.9
) -> Runner:
    """Return step 10: the GPU stops by itself once every image has an answer, and the host asks nothing."""
    network = EarlyExitNetwork(backbone, heads, rules, example_input=images)
    return make_runner(network, images, exits="gated", trunk="cudnn")
