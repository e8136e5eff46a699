"""Correct programs, in which the doctor must find nothing: plain ones, graphs, streams used right, our own runners."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchvision
from auxhead.autotune.measuring.cells import Cell
from auxhead.autotune.measuring.peers import GraphedPeer, NaiveHead, PeerAnswer, bare, forked, in_line
from auxhead.autotune.measuring.subject import build_subject
from auxhead.model import EarlyExitNetwork, FusedAuxHead, attach, fuse_aux_heads, make_runner, make_trunk
from auxhead.model.examples.swap_heads import Net
from auxhead.model.examples.train_save_load_run import make_backbone
from auxhead.model.guides.steps import Graphs
from torch import Tensor, nn

from .layers import Beside, Wide, narrow_input, wide_input
from .program import Made, Program, device

TAPS = ("layer1", "layer2", "layer3")


class TrainingStep:
    """A step of training whose batch comes from pinned memory, and whose loss is read some other time."""

    def __init__(self) -> None:
        layers = [layer for _ in range(3) for layer in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())]
        stem = (nn.Conv2d(3, 64, 3, padding=1), nn.ReLU())
        self.network = nn.Sequential(*stem, *layers, nn.Conv2d(64, 10, 1)).to(device()).train()
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.01, fused=True)
        self.loss = torch.zeros((), device=device())

    @torch.enable_grad()
    def __call__(self, images: Tensor) -> None:
        labels = torch.zeros(len(images), dtype=torch.long, device=device())
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.network(images.to(device(), non_blocking=True)).mean((2, 3)), labels)
        loss.backward()
        self.optimizer.step()
        self.loss += loss.detach()


def training_step() -> Made:
    samples = 256 if torch.cuda.is_available() else 8
    images = torch.randn(samples, 3, 64, 64)
    return TrainingStep(), images.pin_memory() if torch.cuda.is_available() else images


def resnet18(samples: int) -> tuple[nn.Module, Tensor]:
    """A ResNet-18 in half precision and channels_last, and images for it."""
    network = torchvision.models.resnet18(weights=None, num_classes=10)
    x = torch.randn(samples, 3, 224, 224)
    placed = [each.to(device(), torch.float16, memory_format=torch.channels_last) for each in (network, x)]
    return placed[0].eval(), placed[1]


def plain_resnet18() -> Made:
    """256 images: up to 64 or so the device runs ahead of Python, and to say so would be right."""
    return resnet18(256)


def graphed_resnet18() -> Made:
    network, x = resnet18(1)
    return Graphs(network, x), x


def compiled() -> Made:
    """torch.compile, with graphs of its own."""
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())]
    network, x = nn.Sequential(*layers).to(device()).eval(), torch.randn(8, 32, 28, 28, device=device())
    fast = torch.compile(network, mode="reduce-overhead", dynamic=False)
    with torch.no_grad():
        for _ in range(4):  # compiles, warms up, records its graph, replays it
            fast(x)
    torch.cuda.synchronize()
    return fast, x


def timm_in_a_graph() -> Made:
    import timm

    network = timm.create_model("resnet10t", pretrained=False, num_classes=10).to(device(), torch.float16).eval()
    x = torch.randn(8, 3, 176, 176, device=device(), dtype=torch.float16)
    return Graphs(network, x), x


def streams_held() -> Made:
    """A branch beside the trunk on a stream of lower priority; what it reads is held until they have joined."""
    return Beside(), narrow_input()


class Recorded(Beside):
    def run(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x)
        self.side.wait_stream(self.trunk)
        with torch.cuda.stream(self.side):
            beside = self.branch(y)
        y.record_stream(self.side)  # so that it may be freed here
        y = self.second(y)
        y = self.third(y)
        self.trunk.wait_stream(self.side)
        beside.record_stream(self.trunk)
        return y, beside


class Prefetching(nn.Module):
    """Copies the next batch from pinned memory while the network runs on the one before; two buffers take turns."""

    def __init__(self, example: Tensor) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Conv2d(8, 64, 3, padding=1), Wide(), Wide(), Wide()).to(device()).eval()
        self.copies = torch.cuda.Stream()
        self.buffers = [example.to(device()) for _ in range(2)]
        self.filled, self.used = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
        for event in (*self.filled, *self.used):
            event.record()
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        now, following = self.turn, 1 - self.turn
        self.used[following].wait(self.copies)
        with torch.cuda.stream(self.copies):
            self.buffers[following].copy_(x, non_blocking=True)
            self.filled[following].record()
        self.filled[now].wait()
        y = self.network(self.buffers[now])
        self.used[now].record()
        self.turn = following
        return y


def prefetching() -> Made:
    x = torch.randn(64, 8, 56, 56).pin_memory()
    return Prefetching(x), x


class Classifying(nn.Module):
    """Asks for its answer once, at the very end."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers, self.fc, self.read = nn.Sequential(Wide(), Wide(), Wide()), nn.Linear(64, 10), read
        self.to(device()).eval()

    def forward(self, x: Tensor) -> Any:
        return self.read(self.fc(self.layers(x).mean((2, 3))))


def with_heads(samples: int, leaves_at: str | None = None) -> tuple[EarlyExitNetwork, Tensor]:
    """ResNet-18 with fused heads, at one of which all images leave, or at none."""
    backbone, x = resnet18(samples)
    network = EarlyExitNetwork(backbone, {tap: FusedAuxHead(None, 10) for tap in TAPS}, example_input=x)
    network.set_rules({tap: float(tap != leaves_at) for tap in TAPS})  # a confidence is in (0, 1]
    return network, x


def runner(exits: str, leaves_at: str | None = None) -> Made:
    network, x = with_heads(8, leaves_at)
    return make_runner(network, x, exits=exits, trunk="cudnn"), x


def compacting() -> Made:
    """About half of the images leave at layer1, and the others go on in a smaller batch."""
    network, x = with_heads(32)
    with torch.no_grad():
        confidence = network.logits(x)[0].softmax(dim=1).amax(dim=1)
    network.set_rules({"layer1": min(confidence.float().median().item(), 1.0)})
    return make_runner(network, x, exits="polled", compact=True, batch_sizes=(8, 16, 32)), x


def heads_behind() -> Made:
    """Without a runner: all heads in one launch behind the backbone."""
    network, x = with_heads(256)
    return network, x


def peer(function: Callable[..., PeerAnswer], *, naive_heads: bool) -> Made:
    """A peer of the benchmark in its graph."""
    subject = build_subject(Cell("resnet18", "float16", 8, 10, "inner-stages", TAPS), device())
    network, x = subject.network, subject.example
    trunk = make_trunk(network.backbone, network.taps, x, "as_is", network.reading)
    its_heads = [[NaiveHead(head).eval() for head in subject.heads]] if naive_heads else []
    called = partial(function, trunk, network.taps, *its_heads)
    with torch.no_grad():
        for _ in range(3):
            called(x.clone(memory_format=trunk.memory_format))
    torch.cuda.synchronize()
    return GraphedPeer(called, trunk.memory_for(x)), x


def example_swap_heads() -> Made:
    """The network of the example, with all three heads swapped."""
    network = Net().to(device()).eval()
    fuse_aux_heads(network)
    its_steps = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), network.exit2.fc)
    network.set_submodule("exit2", FusedAuxHead.from_module(its_steps))
    samples = 2048 if torch.cuda.is_available() else 8
    return network, torch.randn(samples, 3, 64, 64, device=device())


def example_backbone() -> Made:
    """The backbone of the example that is trained, with heads placed for it, in one graph."""
    x = torch.randn(64, 3, 32, 32, device=device())
    network = attach(make_backbone().to(device()).eval(), ["block1", "block2"], example_input=x)
    return make_runner(network, x, exits="overlapped"), x


#: By name; those that an ordinary machine without a GPU can make come first.
PROGRAMS: dict[str, Program] = {
    f"correct_{name}": Program(make, needs_cuda=index > 3)
    for index, (name, make) in enumerate(
        {
            "labels_at_the_end": lambda: (Classifying(lambda logits: logits.argmax(dim=1).cpu()), wide_input()),
            "number_at_the_end": lambda: (Classifying(lambda logits: logits.amax().item()), wide_input()),
            "example_swap_heads": example_swap_heads,
            "training_step": training_step,
            "plain_resnet18": plain_resnet18,
            "graphed_resnet18": graphed_resnet18,
            "compiled": compiled,
            "timm_in_a_graph": timm_in_a_graph,
            "streams_held": streams_held,
            "streams_recorded": lambda: (Recorded(), narrow_input()),
            "prefetching": prefetching,
            "overlapped": lambda: runner("overlapped"),
            "polled": lambda: runner("polled", "layer2"),
            "gated": lambda: runner("gated"),
            "gated_leaving": lambda: runner("gated", "layer1"),
            "compacting": compacting,
            "heads_behind": heads_behind,
            "peer_bare": lambda: peer(bare, naive_heads=False),
            "peer_in_line": lambda: peer(in_line, naive_heads=True),
            "peer_forked": lambda: peer(forked, naive_heads=True),
            "example_backbone": example_backbone,
        }.items()
    )
}
