"""Random heads for hypothesis: shapes, memory layouts and values of any kind, and their answers in NumPy's float64."""

import itertools
import math
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from support.head_cases import DTYPES, assert_output_form, feature_count, head_logits, make_input, make_linear
from support.tolerance import FLOAT32_ULP, FLOOR_ULPS, assert_as_accurate_as_pytorch
from torch import Tensor

SPECIAL = (math.nan, math.inf, -math.inf)


class Layout(NamedTuple):
    """Where the elements of a tensor lie in a larger buffer; one entry a dimension."""

    order: tuple[int, ...]
    """Dimensions, the outermost in memory first."""
    steps: tuple[int, ...]
    pads: tuple[int, ...]
    """Elements before the first one."""
    expanded: tuple[bool, ...]
    """Dimensions of stride 0."""
    offset: int
    """Elements before everything; 16 bytes are 4 or 8 elements."""


class Case(NamedTuple):
    """A call of ``fused_head``, made again from these few numbers."""

    shape: tuple[int, ...]
    classes: int
    pool: str
    pool_size: tuple[int, int]
    dtype: str
    x: Layout
    weight: Layout
    bias: Layout | None
    scale: float
    special: tuple[tuple[str, int, float], ...]
    """Tensor, place in it (modulo its size) and value."""
    temperature: float
    threshold: float
    tensors: tuple[bool, bool]
    """Whether temperature and threshold are given as tensors."""
    return_probs: bool
    seed: int

    def features(self) -> int:
        return feature_count(self.shape, self.pool, self.pool_size)


class Bounds(NamedTuple):
    """How large cases get."""

    samples: tuple[int, ...]
    channels: int
    side: int
    """Height, width and number of tokens."""
    grid: int
    classes: tuple[int, ...]
    elements: int
    """Of x, each of its distinct ones counted."""
    products: int
    """Multiplications of the linear layer."""


def layouts(rank: int) -> st.SearchStrategy[Layout]:
    """Half of them contiguous but for the address; the others in any order, with gaps and repeats."""
    plain = (tuple(range(rank)), (1,) * rank, (0,) * rank, (False,) * rank)
    last = (0, *range(2, rank), 1)[:rank] if rank > 2 else plain[0]

    def per_dimension(values):
        return st.tuples(*[st.sampled_from(values)] * rank)

    offset = st.sampled_from((0, 0, 1, 3, 4, 5, 8))
    usual = st.sampled_from((plain[0], plain[0], last)).flatmap(
        lambda order: st.builds(Layout, st.just(order), *map(st.just, plain[1:]), offset)
    )
    odd = st.builds(
        Layout,
        st.permutations(range(rank)).map(tuple),
        per_dimension((1, 1, 2, 3)),
        per_dimension((0, 0, 1, 2)),
        per_dimension((False, False, False, True)),
        offset,
    )
    return st.one_of(usual, odd)


@st.composite
def cases(draw, bounds: Bounds) -> Case:
    def size(most):
        return draw(st.sampled_from([min(3, most), *range(1, most + 1)]))  # the first is the one tried most

    rank = draw(st.sampled_from((4, 4, 4, 3, 3, 2)))
    samples = draw(st.sampled_from(bounds.samples))
    rest = {2: lambda: (size(4 * bounds.channels),), 3: lambda: (size(bounds.side), size(bounds.channels))}.get(
        rank, lambda: (size(bounds.channels), size(bounds.side), size(bounds.side))
    )()
    while math.prod(rest) > bounds.elements:
        rest = tuple(max(1, one // 2) for one in rest)
    pool = draw(st.sampled_from(("avg", "max", "none") if rank == 4 else ("avg", "max", "first", "none")))
    grid = (1, 1)
    if rank == 4 and pool != "none":
        grid = draw(st.one_of(st.just((1, 1)), st.tuples(*[st.integers(1, bounds.grid)] * 2)))
    features = feature_count((1, *rest), pool, grid)
    classes = draw(st.sampled_from([k for k in bounds.classes if k * features <= bounds.products] or [2]))
    samples = min(samples, max(1, bounds.elements // math.prod(rest)), max(1, bounds.products // (features * classes)))
    places = st.tuples(st.sampled_from(("x", "x", "weight", "bias")), st.integers(0, 2**20), st.sampled_from(SPECIAL))
    return Case(
        (samples, *rest),
        classes,
        pool,
        grid,
        draw(st.sampled_from(tuple(DTYPES))),
        draw(layouts(rank)),
        draw(layouts(2)),
        draw(st.none() | layouts(1)),
        draw(st.sampled_from((1.0, 1.0, 0.001, 30.0))),
        tuple(draw(st.one_of(st.just([]), st.lists(places, max_size=4)))),
        draw(st.sampled_from((1.0, 1.0, 0.3, 2.5, 50.0))),
        draw(st.sampled_from((0.5, 0.0, 1.0, 0.2, 0.9))),
        (draw(st.booleans()), draw(st.booleans())),
        draw(st.booleans()),
        draw(st.integers(0, 2**16)),
    )


class Inputs(NamedTuple):
    """The tensors of a case, and the memory around each, NaN where no element is."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    buffers: tuple[Tensor, ...]

    @classmethod
    def of(cls, case: Case, device: torch.device) -> "Inputs":
        features, dtype = case.features(), DTYPES[case.dtype]
        weight, bias = make_linear(features, case.classes, seed=case.seed + 1)
        values = {"x": make_input(case.shape, seed=case.seed) * case.scale, "weight": weight, "bias": bias}
        views, buffers = {}, []
        for name, layout in (("x", case.x), ("weight", case.weight), ("bias", case.bias)):
            if layout is None:
                continue
            buffer, distinct = _placed(values[name].shape, layout, dtype, device)
            own = values[name][tuple(slice(0, 1) if one else slice(None) for one in layout.expanded)].clone()
            for tensor, place, value in case.special:
                if tensor == name:
                    own.view(-1)[place % own.numel()] = value
            distinct.copy_(own)
            views[name] = distinct.expand(values[name].shape)
            buffers.append(buffer)
        return cls(views["x"], views["weight"], views.get("bias"), tuple(buffers))

    def copies(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self.buffers]

    def assert_unchanged(self, copies: list[Tensor]) -> None:
        for buffer, copy in zip(self.buffers, copies, strict=True):
            assert torch.equal(buffer.view(torch.uint8), copy.view(torch.uint8)), "an input was written"


def _placed(shape, layout: Layout, dtype, device) -> tuple[Tensor, Tensor]:
    """Return memory full of NaN, and the view of it that holds each distinct element once."""
    rank = len(shape)
    distinct = [1 if layout.expanded[dim] else shape[dim] for dim in range(rank)]
    stored = [layout.pads[dim] + distinct[dim] * layout.steps[dim] for dim in layout.order]
    buffer = torch.full((layout.offset + math.prod(stored),), math.nan, dtype=dtype, device=device)
    inner = buffer[layout.offset :].view(stored)
    inner = inner[tuple(slice(layout.pads[dim], None, layout.steps[dim]) for dim in layout.order)]
    view = inner.permute([layout.order.index(dim) for dim in range(rank)])
    assert list(view.shape) == distinct
    return buffer, view


class Exact(NamedTuple):
    """What a head has to say, in float64."""

    logits: np.ndarray
    """[N, K]"""
    lengths: np.ndarray
    """[N, K]: the sum of the magnitudes of all terms of a logit, which bounds any sum on the way."""
    spreads: np.ndarray
    """[N, K]: the root of the sum of squares of its terms."""


def exact(case: Case, inputs: Inputs) -> Exact:
    """Pool and multiply in NumPy: one window, one product at a time."""
    x, weight = (tensor.detach().cpu().double().numpy() for tensor in (inputs.x, inputs.weight))
    bias = np.zeros(case.classes) if inputs.bias is None else inputs.bias.cpu().double().numpy()
    with np.errstate(all="ignore"):
        features, sizes = _features(x, case), _features(np.abs(x), case)
        terms = features[:, None, :] * weight[None]
        logits = terms.sum(-1) + bias
        lengths = (sizes[:, None, :] * np.abs(weight)[None]).sum(-1) + np.abs(bias)
        return Exact(logits, lengths, np.sqrt((terms**2).sum(-1)))


def _features(x: np.ndarray, case: Case) -> np.ndarray:
    if x.ndim == 2 or case.pool == "none":
        return x.reshape(len(x), -1)
    if x.ndim == 3:
        return x[:, 0] if case.pool == "first" else x.mean(1) if case.pool == "avg" else x.max(1)
    reduce = np.mean if case.pool == "avg" else np.max
    rows, columns = (
        [_window(i, size, n) for i in range(n)] for size, n in zip(x.shape[2:], case.pool_size, strict=True)
    )
    windows = [reduce(x[:, :, row, column], axis=(2, 3)) for row, column in itertools.product(rows, columns)]
    return np.stack(windows, axis=2).reshape(len(x), -1)


def _window(index: int, size: int, windows: int) -> slice:
    return slice(index * size // windows, -((-(index + 1) * size) // windows))


def check_answer(case: Case, inputs: Inputs, out, wanted: Exact, *, by_blas: bool = False) -> None:
    """Assert of an answer all that ``fused_head`` promises, for samples that are finite and those that are not.

    Multiplied ``by_blas``, as in PyTorch and NumPy on the CPU, equal classes need not have equal logits.
    """
    device = inputs.x.device
    assert_output_form(out, case.shape[0], case.classes, device)
    logits = torch.from_numpy(wanted.logits)
    answers = ~(logits.isnan() | (logits == math.inf)).any(1) & (logits != -math.inf).any(1)
    out = out._replace(**{name: one.cpu() for name, one in out._asdict().items() if one is not None})
    threshold = float(torch.tensor(case.threshold, dtype=torch.float32)) if case.tensors[1] else case.threshold
    assert out.confidence[~answers].isnan().all() and not out.exit[~answers].any()
    assert torch.equal(out.exit, out.confidence.double() > threshold), "exit is not confidence > threshold"
    if out.probs is not None:
        assert out.probs[~answers].isnan().all()
        assert torch.equal(out.confidence[answers], out.probs[answers].amax(-1))
    if not answers.any():
        return
    heat = case.temperature
    probs = (logits[answers] / heat).softmax(-1)
    with torch.no_grad():
        pytorch = head_logits(inputs.x, inputs.weight, inputs.bias, pool=case.pool, pool_size=case.pool_size)
        pytorch = (pytorch / heat).softmax(-1).cpu()[answers]
    magnitude = _magnitude(case, wanted, answers.numpy()) / heat
    top, pytorch_top = probs.amax(-1), pytorch.nan_to_num(0.0).amax(-1)
    if out.probs is not None:
        assert_as_accurate_as_pytorch(out.probs[answers], probs, pytorch, magnitude=magnitude, what="probs")
    confidence, label = out.confidence[answers], out.label[answers]
    assert_as_accurate_as_pytorch(confidence, top, pytorch_top, magnitude=magnitude, what="confidence")
    chosen = probs.gather(1, label[:, None])[:, 0]
    assert_as_accurate_as_pytorch(chosen, top, pytorch_top, magnitude=magnitude, what="probability of the label")
    if not by_blas:
        first = _first_of_equals(inputs)
        assert torch.equal(first[label], label), "the label is not the first of classes with the same parameters"


def _magnitude(case: Case, wanted: Exact, answers: np.ndarray) -> float:
    """Return the largest number that is rounded on the way, counted in float32.

    Multiplied in groups of samples, features of half precision are rounded to that before.
    """
    kept = np.isfinite(wanted.logits) & answers[:, None]
    eps = torch.finfo(DTYPES[case.dtype]).eps
    of_features = 0.0 if case.dtype == "fp32" else eps / (FLOOR_ULPS * FLOAT32_ULP) * wanted.spreads[kept].max()
    return float(wanted.lengths[kept].max() + of_features)


def _first_of_equals(inputs: Inputs) -> Tensor:
    """Return for each class the first one that has its weight and bias, bit for bit."""
    rows = inputs.weight.detach().cpu().float()
    if inputs.bias is not None:
        rows = torch.cat([rows, inputs.bias.detach().cpu().float()[:, None]], 1)
    seen: dict[bytes, int] = {}
    return torch.tensor([seen.setdefault(row.tobytes(), number) for number, row in enumerate(rows.numpy())])
