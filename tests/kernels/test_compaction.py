"""compaction.py: open rows move bit for bit, and answers are copied to the right samples of the request."""

from typing import NamedTuple

import pytest
import torch
from auxhead.kernels import ExitBuffers, runs_triton
from auxhead.kernels.compaction import collect, destination, gather_open, moves_rows, new_destinations
from auxhead.kernels.exits import Answer
from torch import Tensor

UNTOUCHED = -77


@pytest.fixture(autouse=True)
def _kernel_runs_here(device):
    if not runs_triton(torch.empty(0, device=device)):
        pytest.skip("kernels are compiled here, or there is no Triton")


class Batch(NamedTuple):
    features: Tensor
    origin: Tensor | None
    buffers: ExitBuffers

    @property
    def answer(self) -> Answer:
        return self.buffers.answer(self.buffers.packed_answer)

    @property
    def exit_index(self) -> Tensor:
        return self.answer[1]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Whatever bits there are, NaN among them."""
    octets = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, device=device)
    return octets.view(dtype)[..., 0]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def make_batch(features: Tensor, *, classes: int | None = 3, origin: bool = True) -> Batch:
    """A batch whose answers are random and whose origins are poisoned."""
    samples, device = len(features), features.device
    buffers = ExitBuffers.allocate(4, samples, classes or 3, with_probs=classes is not None, device=device)
    batch = Batch(features, torch.full((samples,), 1 << 40, device=device) if origin else None, buffers)
    label, exit_index, confidence, probs = batch.answer
    label.random_(0, 1000)
    exit_index.random_(0, 4)
    confidence.uniform_()
    if probs is not None:
        probs.uniform_()
    return batch


def open_rows(batch: Batch, rows: list[int]) -> None:
    batch.exit_index[rows] = -1


def request_answer(samples: int, classes: int | None, device: torch.device) -> Answer:
    answer = make_batch(torch.empty(samples, 1, device=device), classes=classes).answer
    for field in answer:
        if field is not None:
            field.fill_(UNTOUCHED)
    return answer


def table(big: Batch, small: Batch, counts: range) -> Tensor:
    destinations = new_destinations(big.buffers)
    entry = torch.tensor(destination(small.features, small.origin, small.buffers), device=destinations.device)
    destinations[counts.start : counts.stop] = entry
    return destinations


def move(big: Batch, small: Batch, answer: Answer, counts: range | None = None) -> None:
    counts = range(1, len(small.features) + 1) if counts is None else counts
    gather_open(big.features, big.buffers, big.origin, table(big, small, counts), answer)


def assert_answers(answer: Answer, wanted: dict[int, tuple[Batch, int]]) -> None:
    """Of the samples named those of a batch's row; all others untouched."""
    for sample in range(len(answer[0])):
        for field, place in zip(answer, range(4), strict=True):
            if field is None:
                continue
            if sample in wanted:
                batch, row = wanted[sample]
                assert torch.equal(field[sample], batch.answer[place][row])
            else:
                assert (field[sample] == UNTOUCHED).all()


SHAPES = {
    "odd rows": (7, 3, 5),
    "one byte or two a row": (1,),
    "vectors": (24,),
    "several blocks": (5, 33, 130),
    "a row of one": (1, 1, 1),
}
DTYPES = (torch.float16, torch.uint8, torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("shape, dtype", zip(SHAPES, DTYPES, strict=True))
def test_rows_are_moved_bit_for_bit(device, shape, dtype):
    features = random_bits((6, *SHAPES[shape]), dtype, device)
    big = make_batch(features, origin=False)
    small = make_batch(random_bits((4, *SHAPES[shape]), dtype, device))
    before, behind, exits = features.clone(), bits(small.features[3:]).clone(), big.exit_index.clone()
    open_rows(big, [1, 4, 5])
    answer = request_answer(8, 3, device)
    move(big, small, answer)
    assert torch.equal(bits(small.features[:3]), bits(before[[1, 4, 5]]))
    assert torch.equal(bits(features), bits(before)) and torch.equal(bits(small.features[3:]), behind)
    assert small.origin.tolist() == [1, 4, 5, -1] and small.exit_index.tolist() == [-1, -1, -1, 0]
    assert small.buffers.requests.item() == 1
    assert torch.equal(big.exit_index[[0, 2, 3]], exits[[0, 2, 3]]) and (big.exit_index[[1, 4, 5]] == -1).all()
    assert_answers(answer, {row: (big, row) for row in (0, 2, 3)})


@pytest.mark.parametrize("rows", [[], [4], [0, 1, 2, 3, 4]], ids=str)
def test_any_number_of_open_rows(device, rows):
    """Five of them: all, none, one; into a batch of as many."""
    big = make_batch(random_bits((5, 6), torch.float32, device), origin=False)
    small = make_batch(torch.full((5, 6), float("nan"), device=device))
    open_rows(big, rows)
    answer = request_answer(5, 3, device)
    move(big, small, answer, range(0, 6))
    assert torch.equal(bits(small.features[: len(rows)]), bits(big.features[rows]))
    assert small.features[len(rows) :].isnan().all()
    assert small.origin.tolist() == rows + [-1] * (5 - len(rows))
    assert small.exit_index.tolist() == [-1] * len(rows) + [0] * (5 - len(rows))
    assert_answers(answer, {row: (big, row) for row in range(5) if row not in rows})


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
def test_nothing_happens_where_the_table_has_no_batch(device, count):
    big = make_batch(random_bits((5, 6), torch.float32, device), origin=False)
    small = make_batch(random_bits((3, 6), torch.float32, device))
    open_rows(big, list(range(count)))
    answer = request_answer(5, 3, device)
    before = [bits(x).clone() for x in (small.features, small.origin, small.buffers.packed_answer)]
    move(big, small, answer, range(2, 4))
    after = [bits(x) for x in (small.features, small.origin, small.buffers.packed_answer)]
    moved = count in (2, 3)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)) == (not moved)
    assert small.buffers.requests.item() == int(moved)
    assert_answers(answer, {row: (big, row) for row in range(count, 5)} if moved else {})


def test_a_table_leads_to_several_batches(device):
    big = make_batch(random_bits((8, 6), torch.float32, device), origin=False)
    two, four = (make_batch(random_bits((size, 6), torch.float32, device)) for size in (2, 4))
    destinations = table(big, two, range(1, 3)) + table(big, four, range(3, 5))
    for rows in ([7], [0, 6], [1, 2, 3], [4, 5, 6, 7]):
        big.exit_index.fill_(0)
        open_rows(big, rows)
        gather_open(big.features, big.buffers, None, destinations, request_answer(8, 3, device))
        small = two if len(rows) <= 2 else four
        assert torch.equal(bits(small.features[: len(rows)]), bits(big.features[rows]))
        assert small.origin[: len(rows)].tolist() == rows
    assert two.buffers.requests.item() == four.buffers.requests.item() == 2


@pytest.mark.parametrize("classes", [None, 1, 1030], ids=str)
def test_two_moves_and_the_answers_at_the_end(device, classes):
    """13 samples, the batch being padded; nobody's rows have answers that must not show."""
    first = make_batch(random_bits((16, 5), torch.float16, device), classes=classes, origin=False)
    second = make_batch(random_bits((8, 5), torch.float16, device), classes=classes)
    third = make_batch(random_bits((4, 5), torch.float16, device), classes=classes)
    answer = request_answer(16, classes, device)
    stays = [0, 2, 3, 7, 11, 12]
    open_rows(first, stays)
    move(first, second, answer)
    second.exit_index[[0, 2, 5]] = 1  # samples 0, 3 and 12 leave
    move(second, third, answer)
    assert third.origin.tolist() == [2, 7, 11, -1]
    assert torch.equal(bits(third.features[:3]), bits(first.features[[2, 7, 11]]))
    third.exit_index[:3] = 2
    collect(third.buffers, third.origin, answer)
    wanted = {row: (first, row) for row in range(16) if row not in stays}
    wanted |= {sample: (second, row) for row, sample in ((0, 0), (2, 3), (5, 12))}
    wanted |= {sample: (third, row) for row, sample in enumerate((2, 7, 11))}
    assert_answers(answer, wanted)


def test_which_rows_can_be_moved(device):
    x = torch.zeros(6, 4, 5, 5, device=device)
    last = x.to(memory_format=torch.channels_last)
    assert moves_rows(x) and moves_rows(last) and moves_rows(x[:3]) and moves_rows(x[:, :, :1, :1].contiguous())
    assert moves_rows(x, x[:3]) and moves_rows(last, last[:1]) and not moves_rows(x, last[:3])
    assert not moves_rows(x[:, :2]) and not moves_rows(x[..., ::2]) and not moves_rows(x[::2])
    assert not moves_rows(x.transpose(0, 1)) and not moves_rows(x[:, :1].expand(-1, 4, -1, -1))
    assert moves_rows(x[:1, :, :, :1].contiguous()) and not moves_rows(x[:0, :0])
    flat = torch.zeros(31, device=device)
    assert moves_rows(flat[1:].view(6, 5)) and not moves_rows(flat[1:].view(6, 5), flat[:10].view(2, 5)[:, :4])
    pairs = torch.zeros(61, device=device)
    assert not moves_rows(pairs[:60].view(6, 10), pairs[1:21].view(2, 10)), "in words of another size"
