"""The demo's digits through every runner on a GPU: labels and exits are the eager runner's, padded and split too."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from auxhead.autotune.measuring.cells import RUNNERS
from auxhead.autotune.measuring.eager_truth import (
    Answer,
    Comparison,
    Expected,
    Rounding,
    logits_of_exits,
    measure_rounding,
    truth_of_logits,
    wrong_in_words,
)
from auxhead.model import EagerRunner, EarlyExitNetwork, ExitResult, Trunk, make_runner, make_trunk
from auxhead.model.basics.images import normalise
from auxhead.model.commands.demo_run import run_demo
from auxhead.model.training.data_sets import load_digits
from support.example_models import needs_gpu
from torch import Tensor

pytestmark = [*needs_gpu, pytest.mark.usefixtures("stops_at_every_tap")]

CAPTURED = (1, 8, 32, 128)
#: Sizes of requests: some fit, most are padded, the last are split.
ASKED = (1, 2, 5, 8, 9, 20, 32, 33, 77, 127, 128, 129, 160)
#: Rounding of confidences and logits that is allowed for, however exact the eager network is on the batches that it is
#: measured with: convolution algorithms differ by batch size and by trunk.
LEAST_ROUNDING = 5e-5


@pytest.fixture(autouse=True)
def _without_tf32() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=False):
        yield


@pytest.fixture(scope="module")
def digits() -> tuple[EarlyExitNetwork, Tensor]:
    """The demo's network, shortly trained, its thresholds calibrated, and the test split [359, 3, 16, 16] float32."""
    device = torch.device("cuda", torch.cuda.current_device())
    done = run_demo(load_digits(), image_size=16, device=device, epochs=4)
    x = normalise(done.splits.test.pixels.to(device)).contiguous(memory_format=torch.channels_last)
    return done.network, x.contiguous(memory_format=torch.channels_last)


def in_pieces(samples: int) -> list[Tensor]:
    """Places of consecutive samples in pieces of each length in turn, beginning anew after the last sample."""
    return list((torch.arange(sum(ASKED)) % samples).split(list(ASKED)))


def truth_of(network: EarlyExitNetwork, trunk: Trunk, x: Tensor) -> Expected:
    """What the trunk says eagerly about all samples, and which of its decisions are within its own rounding."""
    logits = logits_of_exits(
        trunk.module,
        network.taps,
        [head.logits for head in network.fused_heads],
        x.contiguous(memory_format=trunk.memory_format),
        None if trunk.classifier is None else trunk.classifier.logits,
    )
    measured = measure_rounding(network, [x, *(x[:size] for size in CAPTURED)])
    rounding = Rounding(*([max(error, LEAST_ROUNDING) for error in errors] for errors in measured))
    return truth_of_logits(logits, network.fused_heads, rounding)


def answer_of(result: ExitResult) -> Answer:
    return Answer(result.label, result.confidence.double(), result.exit_index)


def counted(runner: Callable[[Tensor], ExitResult], eager: EagerRunner, truth: Expected, x: Tensor) -> dict[str, int]:
    """Compare a runner with the eager one, piece by piece; requests follow one another without a wait."""
    pieces = [piece.to(x.device) for piece in in_pieces(len(x))]
    found = [runner(x[piece]) for piece in pieces]
    comparison = Comparison()
    for piece, result in zip(pieces, found, strict=True):
        of_piece = Expected(answer_of(eager(x[piece])), *(field[piece] for field in truth[1:]))
        comparison.add(answer_of(result), of_piece)
    return comparison.counts()


@pytest.mark.parametrize(("trunk", "dtype"), [("as_is", torch.float32), ("cudnn", torch.float16)], ids=str)
@pytest.mark.parametrize("way", RUNNERS)
def test_the_test_split_in_batches_of_many_sizes(
    way: str,
    trunk: str,
    dtype: torch.dtype,
    digits: tuple[EarlyExitNetwork, Tensor],
    record_property: Callable[[str, object], None],
) -> None:
    network, x = copy.deepcopy(digits[0]).to(dtype), digits[1].to(dtype)
    made = make_trunk(network.backbone, network.taps, x[: CAPTURED[-1]], trunk)
    truth, eager = truth_of(network, made, x), EagerRunner(network, trunk=made)
    assert truth.answer.exit_index.unique().numel() > 2, "hardly any of the exits is tested"
    with make_runner(network, x[: CAPTURED[-1]], batch_sizes=CAPTURED, trunk=trunk, exits=way) as runner:
        counts = counted(runner, eager, truth, x)
    for name, count in counts.items():
        record_property(name, count)
    print(f"{way}, trunk {trunk}, {dtype}: {counts}")  # pytest -rP shows it
    assert counts["samples"] == sum(ASKED)
    assert wrong_in_words(counts) is None, counts
    assert counts["differing"] <= 0.03 * counts["samples"], "rounding excuses too much"
