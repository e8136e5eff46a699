"""attention.py: as exact as PyTorch's attention, in one launch, for few tokens."""

import pytest
import torch
from auxhead.kernels import attend, runs_triton
from auxhead.kernels.attention import _attention_operator, takes_attention
from hypothesis import given
from hypothesis import strategies as st
from support.counted_launches import counted_launches
from torch.nn import functional as F

DTYPES = [torch.float16, torch.bfloat16]
#: Samples, heads, queries, keys, numbers, and biases: how many, 0 for none, and whether each is for all heads.
CASES = [
    (1, 3, 197, 197, 64, 0, False),  # DeiT's
    (2, 2, 49, 49, 32, 1, False),  # of windows
    (6, 2, 12, 12, 16, 3, False),  # of two maps in three windows
    (2, 3, 7, 7, 12, 2, True),
    (1, 1, 1, 1, 8, 0, False),
    (3, 1, 5, 40, 24, 1, True),
    (1, 2, 33, 256, 128, 0, False),
    (2, 100, 48, 3, 8, 0, False),  # blocks of 32 queries
]


@pytest.fixture
def launches(monkeypatch):
    """Which calls got as far as the kernel."""
    return counted_launches(monkeypatch, "attention")


def inputs(case, dtype, device, scale=1.0):
    """Queries, keys and values as one product leaves them, if they are as many, and a bias or None."""
    samples, heads, queries, keys, numbers, biases, shared = case

    def of(tokens: int, parts: int) -> tuple[torch.Tensor, ...]:
        made = (torch.randn(samples, tokens, parts, heads, numbers, device=device) * scale).to(dtype)
        return tuple(each.transpose(1, 2) for each in made.unbind(2))

    given = of(queries, 3) if queries == keys else (*of(queries, 1), *of(keys, 2))
    bias = torch.randn(biases, 1 if shared else heads, queries, keys, device=device).to(dtype) if biases else None
    return *given, bias


def in_pytorch(query, key, value, bias):
    if bias is not None:
        bias = bias.repeat(len(query) // len(bias), 1, 1, 1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def assert_exact(found, *given) -> None:
    """Off by at most twice what PyTorch is, of sums of products in float64."""
    truth = in_pytorch(*(None if each is None else each.double() for each in given))
    theirs = in_pytorch(*given)
    assert found.dtype == given[0].dtype and found.shape == truth.shape
    # the host's attention keeps weights in float32, where GPUs round them before they multiply
    rounded = torch.finfo(found.dtype).eps * given[2].abs().max().double()
    allowed = 2 * (theirs.double() - truth).abs().max() + rounded
    assert (found.double() - truth).abs().max() <= allowed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_as_exact_as_pytorchs(device, launches, poisoned_empty, case, dtype) -> None:
    given = inputs(case, dtype, device)
    found = attend(*given)
    assert len(launches) == (device.type == "cuda" or not torch.cuda.is_available())
    assert_exact(found, *given)
    assert found.transpose(1, 2).is_contiguous(), "as the next product reads it"
    assert torch.equal(found, attend(*given))


@given(data=st.data())
def test_any_sizes(device, data) -> None:
    samples, heads, queries, keys = (data.draw(st.integers(1, most)) for most in (4, 3, 70, 70))
    biases = data.draw(st.sampled_from([0, 1, samples]))
    case = (samples, heads, queries, keys, data.draw(st.integers(1, 40)), biases, data.draw(st.booleans()))
    given = inputs(case, data.draw(st.sampled_from(DTYPES)), device, data.draw(st.sampled_from([1e-3, 1.0, 8.0])))
    assert_exact(attend(*given), *given)


def test_the_operators_output_lies_as_compilers_are_told(device) -> None:
    for case in CASES[:3]:
        given = inputs(case, torch.float16, device)
        torch.library.opcheck(_attention_operator, (*given, True), test_utils="test_faketensor")
        opened = _attention_operator(*given, True)
        assert torch.equal(opened, attend(*given).transpose(1, 2).flatten(2)) and opened.is_contiguous()
    given = inputs(CASES[0], torch.float32, device)  # a compiler has seen others
    torch.library.opcheck(_attention_operator, (*given, False), test_utils="test_faketensor")


def test_odd_numbers_stay_odd(device) -> None:
    query, key, value, _ = inputs((2, 2, 5, 7, 16, 0, False), torch.float16, device)
    query[0, 0, 1, 0], key[1, 0, 2, 3], value[1, 1, 3, 4] = float("nan"), float("nan"), float("inf")
    found = attend(query, key, value)
    wide = [each.double() for each in (query, key, value)]
    wanted = torch.softmax(wide[0] @ wide[1].mT / 4.0, -1) @ wide[2]  # the host's own attention makes NaN of infinity
    assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.isinf(), wanted.isinf())
    assert found[0, 0, 1].isnan().all() and found[0, 0, 2].isfinite().all() and found[1, 1, :, 4].isinf().all()


@pytest.mark.parametrize(
    "odd", ["float32", "keys", "numbers", "programs", "gradient", "steps", "heads", "negated", "of one bias less"]
)
def test_all_others_are_pytorchs(device, launches, odd) -> None:
    dtype = torch.float32 if odd == "float32" else torch.float16
    changed = {"keys": (1, 1, 4, 257, 8), "numbers": (1, 1, 4, 4, 129), "programs": (5, 53, 5, 65, 8)}
    biases = 2 if odd == "of one bias less" else 0
    query, key, value, bias = inputs((*changed.get(odd, (3, 2, 4, 4, 8)), biases, False), dtype, device)
    if odd == "gradient":
        value.requires_grad_()
    elif odd == "steps":
        key = key.transpose(2, 3).contiguous().transpose(2, 3)
    elif odd == "heads":
        key, value = key[:, :1], value[:, :1]
    elif odd == "negated":
        value = torch._neg_view(value)
    assert not takes_attention(query, key, value, bias)
    if odd == "of one bias less":
        with pytest.raises(RuntimeError, match="size"):
            attend(query, key, value, bias)
    else:
        torch.testing.assert_close(attend(query, key, value, bias), in_pytorch(query, key, value, bias))
    assert not launches


def test_a_query_that_attends_to_nothing_is_answered_by_zeros(device) -> None:
    query, key, value, bias = inputs((2, 2, 8, 8, 16, 1, False), torch.float16, device)
    bias[:, :, 1] = float("-inf")
    bias[:, :, 2, :4] = float("-inf")
    found = attend(query, key, value, bias)
    assert takes_attention(query, key, value, bias) == runs_triton(query) and not found[:, :, 1].any()
    assert_exact(found, query, key, value, bias)


def test_an_answer_of_too_many_numbers_is_pytorchs(device) -> None:
    query, key = (torch.zeros(1, 1, 1, 64, device=device).half().expand(2**15, 1, n, 64) for n in (2**10 + 1, 8))
    assert takes_attention(query[:4], key[:4], key[:4]) == runs_triton(query)
    assert not takes_attention(query, key, key)
