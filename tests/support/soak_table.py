"""Networks of the soak run, rules for them, and tables of what eager mode answers to each input by each rule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from auxhead.model import EarlyExitNetwork, ExitResult, ExitRule, make_trunk
from support import graph_runner_cases
from support.example_models import SmallNet
from support.one_by_one import one_by_one
from torch import Tensor, nn

Rules = dict[str, ExitRule]
#: What a row of answers holds where there is no sample.
NOTHING = -1
#: Largest difference of two right confidences or probabilities.
TOLERANCE = graph_runner_cases.TOLERANCE[torch.float16]
#: Samples that eager mode looks over for such as are clear under every rule.
_TRIED = 4096


class SoakNet(SmallNet):
    """Multiplies by a large matrix, for which cuBLAS takes a workspace, and keeps a mask for its last batch size."""

    mask: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Flatten(), nn.Linear(8 * 32 * 32, 64), nn.Tanh(), nn.Linear(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.block0(x)
        if self.mask is None or len(self.mask) != len(x) or self.mask.dtype != x.dtype:
            self.mask = torch.full((len(x), 1, 1, 1), 0.5, device=x.device, dtype=x.dtype)
        x = x * self.mask + self.mix(x)[:, :, None, None]
        x = self.block2(self.block1(x))
        return self.fc(x.mean((2, 3)))


def soak_network(backbone: Callable[[], nn.Module], seed: int) -> EarlyExitNetwork:
    """A network in half precision whose heads let half of the samples leave."""
    torch.manual_seed(seed)
    x = graph_runner_cases.images(64, torch.float32)
    return graph_runner_cases.with_heads(backbone(), SmallNet.taps, x, torch.float16)


def rules_for(network: EarlyExitNetwork) -> list[Rules]:
    """Rules under which samples leave at all exits, at the first, the second and the last one, with heads disabled
    and with temperatures."""
    own = [head.rule.threshold for head in network.fused_heads]

    def rules(thresholds: Sequence[float], temperature: float = 1.0, disabled: Sequence[int] = ()) -> Rules:
        return {
            tap: ExitRule(threshold, temperature=temperature, enabled=index not in disabled)
            for index, (tap, threshold) in enumerate(zip(network.taps, thresholds, strict=True))
        }

    return [
        rules(own),
        rules([0.0, 0.0, 0.0]),
        rules([1.0, 1.0, 1.0]),
        rules([1.0, 0.0, 1.0]),
        rules(own, disabled=[0]),
        rules([0.8 * threshold for threshold in own], temperature=1.5),
        rules([0.7 * threshold for threshold in own], temperature=2.0, disabled=[1]),
    ]


@dataclass(frozen=True)
class Table:
    """Inputs, rules, and the right answers: row ``input * len(rules) + rule`` of ``ids`` and ``numbers``."""

    network: EarlyExitNetwork
    trunk: str
    inputs: list[Tensor]
    rules: list[Rules]
    ids: Tensor
    """[rows, 2 * the largest batch] int64: labels, exits, then NOTHING."""
    numbers: Tensor
    """[rows, (1 + classes) * the largest batch] float32: confidences, probabilities, then NOTHING."""

    @classmethod
    def of(
        cls,
        network: EarlyExitNetwork,
        trunk: str,
        inputs: list[Tensor],
        rules: list[Rules],
        run: Callable[[Tensor], ExitResult],
    ) -> "Table":
        """Ask ``run`` for every input under each of the rules."""
        device = inputs[0].device
        rows, most, classes = len(inputs) * len(rules), max(map(len, inputs)), run(inputs[0]).probs.shape[1]
        ids = torch.full((rows, 2 * most), NOTHING, device=device)
        numbers = torch.full((rows, (1 + classes) * most), float(NOTHING), device=device)
        for number, rule in enumerate(rules):
            network.set_rules(rule)
            for case, x in enumerate(inputs):
                row, n = case * len(rules) + number, len(x)
                write_answer(run(x), ids[row, : 2 * n], numbers[row, : (1 + classes) * n])
        return cls(network, trunk, inputs, rules, ids, numbers)

    def shares(self) -> list[int]:
        """Count the answers of each exit."""
        most = self.ids.shape[1] // 2
        sizes = torch.tensor([len(x) for x in self.inputs for _ in self.rules], device=self.ids.device)
        exits = torch.arange(2 * most, device=self.ids.device)[None] // sizes[:, None] == 1
        return torch.bincount(self.ids[exits]).tolist()

    def differing(self, rows: Tensor, ids: Tensor, numbers: Tensor) -> Tensor:
        """[answers] bool: another label or exit than in the row of the table, or a number too far from it."""
        far = ~((numbers - self.numbers[rows]).abs() <= TOLERANCE)
        return (ids != self.ids[rows]).any(1) | far.any(1)

    def explain(self, row: int, ids: Tensor, numbers: Tensor) -> str:
        """Say in which respect an answer differs from a row of the table."""
        n = len(self.inputs[row // len(self.rules)])
        wrong = (ids != self.ids[row])[: 2 * n].cpu()
        off = (numbers - self.numbers[row]).abs().nan_to_num(torch.inf)
        return (
            f"{int(wrong[:n].sum())} of {n} labels and {int(wrong[n:].sum())} exits wrong, confidence off by "
            f"{off[:n].max():.3g}, probabilities by {off[n:].max():.3g}: got labels {ids[:n].tolist()} at exits "
            f"{ids[n : 2 * n].tolist()}, wants {self.ids[row, :n].tolist()} at {self.ids[row, n : 2 * n].tolist()}"
        )


def write_answer(answer: ExitResult, ids: Tensor, numbers: Tensor) -> None:
    """Copy an answer, on the current stream and without a wait of the host."""
    torch.cat((answer.label, answer.exit_index), out=ids)
    torch.cat((answer.confidence, answer.probs.flatten()), out=numbers)


def soak_table(network: EarlyExitNetwork, trunk: str, sizes: Sequence[int]) -> Table:
    """A table for batches of some sizes, none of whose samples is near a decision under any rule."""
    rules = rules_for(network)
    x = graph_runner_cases.images(_TRIED)
    made = make_trunk(network.backbone, network.taps, x[:8], trunk)
    near = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for rule in rules:
        network.set_rules(rule)
        near |= graph_runner_cases.near_a_decision(network, made, x, 3 * TOLERANCE)
    clear = x[~near]
    if len(clear) < sum(sizes):
        raise RuntimeError(f"{len(clear)} of {len(x)} samples are clear, wants {sum(sizes)}")
    inputs = list(clear[: sum(sizes)].clone().split(list(sizes)))
    inputs[1::3] = [y.contiguous(memory_format=torch.channels_last) for y in inputs[1::3]]
    table = Table.of(network, trunk, inputs, rules, partial(one_by_one, network, trunk=made))
    if len(table.shares()) != len(network.taps) + 1 or not all(table.shares()):
        raise RuntimeError(f"wants answers of each exit, got {table.shares()}")
    return table


def with_pinned(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The same inputs, every fourth one in pinned memory of the host."""
    return [x.cpu().pin_memory() if number % 4 == 3 else x for number, x in enumerate(inputs)]
