"""Subjects of measurements: a cell's network with random weights, or a user's own, and random inputs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels import CRITERIA
from ...model import EarlyExitNetwork, FusedAuxHead
from ...model.basics.bad_input import BadInput
from ...model.commands.user_model import load_factory
from .cells import MIXED, OWN, SHARES, Cell, Heads

SEED = 0
#: Spread of the logits over samples: wide enough that labels and confidences tell one input from another.
LOGIT_SPREAD = 3.0
#: Scale of the last batch-norm of a residual block.
RESIDUAL_SCALE = 0.2
#: Of heads that have a hidden layer.
HIDDEN_FEATURES = 128
#: Samples that "auto" chooses by, unless one batch holds more: its trunks are checked on them in float64.
AUTO_SAMPLES = 256
#: Samples by which the batch-norm statistics of random weights are set.
SAMPLES = 64


@dataclass(frozen=True)
class Subject:
    """A network in eval mode and inputs for it, all on one device."""

    cell: Cell
    network: EarlyExitNetwork
    inputs: tuple[Tensor, ...]
    """Different batches of one shape, dtype and layout."""

    @property
    def example(self) -> Tensor:
        """The first input."""
        return self.inputs[0]

    @property
    def heads(self) -> list[FusedAuxHead]:
        """The heads, in the order of the taps."""
        return self.network.fused_heads

    @property
    def samples_for_auto(self) -> Tensor:
        """Inputs in one batch, to choose a runner by."""
        return torch.cat(self.inputs[: max(1, AUTO_SAMPLES // self.cell.batch)])

    @cached_property
    def share_thresholds(self) -> list[float]:
        """Thresholds of the heads with which the shares of ``SHARES`` hold over all inputs together."""
        with torch.no_grad():
            by_input = [
                torch.stack([(y.double() / head.rule.temperature).softmax(1).amax(1) for y, head in exits])
                for exits in (zip(self.network.logits(x), self.heads, strict=False) for x in self.inputs)
            ]
        return thresholds_of_shares(torch.cat(by_input, dim=1), [int(share) for share in SHARES.split("/")])

    def exits(self, pattern: str) -> AbstractContextManager[None]:
        """Let samples leave as ``pattern`` says until the context ends."""
        if pattern == OWN:
            return nullcontext()
        if pattern == SHARES:
            return self.thresholds(self.share_thresholds)
        ranges = zip(self.network.taps, (CRITERIA[head.rule.criterion] for head in self.heads), strict=True)
        # every confidence exceeds the low end, none the high one
        return self.thresholds([one.low if tap == pattern else one.high for tap, one in ranges])

    @contextmanager
    def thresholds(self, values: Sequence[float]) -> Iterator[None]:
        """Give heads these thresholds until the context ends; written in place, so that nothing is recaptured."""
        rules = [head.rule for head in self.heads]
        before = [(rule.threshold, rule.enabled) for rule in rules]
        try:
            for rule, threshold in zip(rules, values, strict=True):
                rule.threshold, rule.enabled = threshold, True
            yield
        finally:
            for rule, (threshold, enabled) in zip(rules, before, strict=True):
                rule.threshold, rule.enabled = threshold, enabled


def build_subject(cell: Cell, device: torch.device) -> Subject:
    """Make the network of a cell with random weights, the same ones every time.

    Weights alone are not enough to tell right answers from wrong ones: a fresh ResNet answers almost the same for every
    input, so that a graph which goes on answering for another input would pass. So batch-norm takes the statistics of
    random pictures, and every exit's logits are shifted and scaled to mean 0 and a spread of 3 over them. Blocks add
    little to what they are given, as in trained networks: a fresh ResNet-50 in bfloat16 is off by 2.5 of these 3, and
    by 0.3 so.
    """
    from torchvision import models  # takes a second: commands that build nothing need not wait for it

    dtype = getattr(torch, cell.dtype)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(SEED)
        backbone = getattr(models, cell.model)(weights=None, num_classes=cell.classes).to(device)
        for block in backbone.modules():
            last = getattr(block, "bn3", None) or getattr(block, "bn2", None)
            if last is not None:
                last.weight.fill_(RESIDUAL_SCALE)
        pictures = random_pictures(SAMPLES, cell.input, device)
        settle_norms(backbone, pictures)
        heads = {tap: _head(cell, backbone.get_submodule(tap), device) for tap in cell.taps}
        network = EarlyExitNetwork(backbone.eval(), heads, example_input=pictures[:2]).eval()
        spread_logits(network, [*(head.linear for head in heads.values()), backbone.fc], pictures)
        network = network.to(dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = [
            random_pictures(cell.batch, cell.input, device).to(dtype=dtype, memory_format=torch.channels_last)
            for _ in range(_inputs_for(cell))
        ]
    return Subject(cell, network, tuple(inputs))


def settle_norms(backbone: nn.Module, pictures: Tensor) -> None:
    """Give the batch norms of random weights the statistics of some pictures; leaves the backbone in training mode."""
    norms = [layer for layer in backbone.modules() if isinstance(layer, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # the mean over all batches seen
    backbone.train()(pictures)
    for norm in norms:
        norm.momentum = 0.1


def spread_logits(network: EarlyExitNetwork, linears: Sequence[nn.Linear], pictures: Tensor) -> None:
    """Shift and scale each exit's logits to mean 0 and ``LOGIT_SPREAD`` over some pictures, by its last layer."""
    for linear, logits in zip(linears, network.logits(pictures), strict=True):
        logits = logits.float()
        scale = LOGIT_SPREAD / logits.std(dim=0).mean()
        linear.weight.mul_(scale)
        linear.bias.sub_(logits.mean(dim=0)).mul_(scale)


def _head(cell: Cell, layer: nn.Module, device: torch.device) -> FusedAuxHead:
    """Make a head of the cell's kind for what a stage or block of a ResNet returns."""
    if cell.heads == Heads.hidden.value:
        return FusedAuxHead(None, cell.classes, hidden_features=HIDDEN_FEATURES, activation="gelu", device=device)
    if cell.heads == Heads.norm.value:
        last = [part for part in layer.modules() if isinstance(part, nn.BatchNorm2d)][-1]
        return FusedAuxHead(last.num_features, cell.classes, norm=True, device=device)
    return FusedAuxHead(None, cell.classes, device=device)


def random_pictures(samples: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return [N, C, H, W] float32: clouds, each of a colour and contrast of its own that outlast the pooling."""
    colour = 2.0 * torch.randn(samples, shape[0], 1, 1, device=device)
    contrast = 2.0 * torch.rand(samples, 1, 1, 1, device=device)
    clouds = torch.randn(samples, shape[0], 4, 4, device=device)
    return colour + contrast * F.interpolate(clouds, size=shape[1:], mode="bilinear")


def thresholds_of_shares(confidence: Tensor, shares: Sequence[int]) -> list[float]:
    """Return the thresholds by which samples leave in the given shares, each at the first head that is sure.

    Every threshold lies midway between the confidences of the last sample that leaves and of the first that stays;
    samples of one confidence leave or stay together.

    Args:
        confidence: [E, M], of E heads in M samples, from 0 to 1.
        shares: in percent, of each head and, last, of the classifier.
    """
    samples = confidence.shape[1]
    open_ = torch.ones(samples, dtype=torch.bool, device=confidence.device)
    thresholds = []
    percent = 0
    for at_head, share in zip(confidence, shares, strict=False):
        percent += share
        stay = samples - round(samples * percent / 100)
        ordered = torch.cat([at_head.new_zeros(1), at_head[open_].sort().values, at_head.new_ones(1)])
        thresholds.append(ordered[stay : stay + 2].mean().item())
        open_ &= at_head <= thresholds[-1]
    return thresholds


def _inputs_for(cell: Cell) -> int:
    """Return at least two, so that an answer for the input before shows, some 16 samples, and tens where exits mix."""
    inputs = max(2, 16 // cell.batch)
    return -(-inputs // 10) * 10 if MIXED.get(cell.placement) == SHARES else inputs


def find_subject(model: str, option: str = "MODEL", *, may_be_on_cpu: bool = False) -> Callable[[], Subject]:
    """Find a user's factory that an option names, see :func:`auxhead.model.commands.user_model.load_factory`.

    Returns:
        A function that calls it; raises ``BadInput`` where it returns something else than an :class:`EarlyExitNetwork`
        in eval mode and a batch that it takes, both on one CUDA device, or the CPU where they may be there.

    Raises:
        BadInput: there is no such function.
    """
    factory = load_factory(model, option)

    def make() -> Subject:
        network, example = factory()
        _check_own(f"{option}: {model}", network, example, ("cuda", "cpu") if may_be_on_cpu else ("cuda",))
        return subject_of(model, network, example)

    return make


def _check_own(whose: str, network: EarlyExitNetwork, example: Tensor, kinds: Sequence[str]) -> None:
    wants = "wants (network, example_input): an EarlyExitNetwork in eval mode and a batch [N, ...], on one CUDA device"
    wants += " or on the CPU" if "cpu" in kinds else ""
    elsewhere = {str(tensor.device) for tensor in (*network.parameters(), *network.buffers(), example)}
    if example.device.type not in kinds or len(elsewhere) > 1:
        raise BadInput(f"{whose} returned tensors on {', '.join(sorted(elsewhere))}; {wants}")
    if any(part.training for part in network.modules()):
        raise BadInput(f"{whose} returned a network in training mode; {wants}")
    try:
        network.check_taps(example)
    except (ValueError, TypeError, RuntimeError) as error:
        raise BadInput(f"{whose} returned a network that does not run on its example: {error}") from error


def subject_of(model: str, network: EarlyExitNetwork, example: Tensor) -> Subject:
    """Return the subject of a user's network; inputs are random ones like the example."""
    cell = own_cell(model, network, example)
    with torch.random.fork_rng(devices=[example.device] if example.is_cuda else []):
        torch.manual_seed(SEED)
        others = [_like(example) for _ in range(_inputs_for(cell) - 1)]
    return Subject(cell, network, (example, *others))


def own_cell(model: str, network: EarlyExitNetwork, example: Tensor) -> Cell:
    """Return the cell of a user's network, called ``model``, and a batch like the example."""
    return Cell(
        model=model,
        dtype=str(example.dtype).removeprefix("torch."),
        batch=len(example),
        classes=network.fused_heads[0].num_classes,
        placement="own",
        taps=network.taps,
        input=tuple(example.shape[1:]),
    )


def _like(example: Tensor) -> Tensor:
    if not example.is_floating_point():  # tokens: the same ones in another order
        shuffled = example.flatten()[torch.randperm(example.numel(), device=example.device)]
        return shuffled.view(example.shape)
    mean, spread = example.float().mean(), example.float().std()
    return (torch.randn_like(example, dtype=torch.float32) * spread + mean).to(example.dtype)
