"""attend: softmax(query key + bias) value over few tokens by a Triton kernel, where it takes them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .early_start import early_start
from .fused_head import runs_triton, wants_plain_pytorch
from .launch.launch_config import next_power_of_2

try:
    from .jit import attention as kernel
except ImportError:  # no Triton for this platform
    kernel = None  # type: ignore[assignment]

#: Keys of a head at most, all of which a program reads at once, and numbers of each.
MOST_KEYS, MOST_NUMBERS = 256, 128
#: Queries of a program, of which tensor cores take 16 at once: as few as make no more programs than an H200 has
#: multiprocessors. ViT-B/16's image takes 4.8 us for 8.3 of PyTorch's, DeiT-T's 3.8 for 8.1 (H200).
_QUERIES, _PROGRAMS = (16, 32, 64), 132
#: Programs of 64 queries at most where a head has more keys than that. Of more, libraries' blocks of 128 fill a GPU,
#: too: eight images of ViT-B/16 take 13.2 us for 12.1. Of fewer keys libraries never catch up: Swin-T's 2048 windows of
#: 3 heads take 44 us for 167 (H200).
_MOST_PROGRAMS = 264


def takes_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether the kernel attends; of more samples or heads libraries fill a GPU, too, and are PyTorch's."""
    tensors = [query, key, value, *([] if bias is None else [bias])]
    return (
        runs_triton(query)
        and not wants_plain_pytorch()
        and all(each.ndim == 4 and each.device == query.device and not each.is_neg() for each in tensors)
        and all(0 < each.numel() and _reach(each) < 2**31 for each in tensors)
        and query.numel() < 2**31  # as many as are written
        and query.dtype in (torch.float16, torch.bfloat16)
        and all(each.dtype == query.dtype for each in tensors)
        and key.shape == value.shape
        and query.shape[:2] == key.shape[:2]
        and query.shape[3] == key.shape[3] <= MOST_NUMBERS
        and key.shape[2] <= MOST_KEYS
        and all(each.stride(3) == 1 for each in tensors[:3])
        and (bias is None or _fits(bias, query, key))
        and not (torch.is_grad_enabled() and any(each.requires_grad for each in tensors))
        and (key.shape[2] <= _QUERIES[-1] or _programs(query, _QUERIES[-1]) <= _MOST_PROGRAMS)
    )


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, begins_early: bool = False) -> Tensor:
    """Attend from ``query``, [N, H, T, D], to ``key`` and ``value``, [N, H, S, D]; as PyTorch does, in one launch.

    Arguments, result and errors are those of ``torch.nn.functional.scaled_dot_product_attention``, but for ``bias``,
    [B, H, T, S] or with one head for all: it is added for sample n as of its own n % B, as windows of several maps want
    it. Products are summed, and the softmax is taken, in float32; weights are rounded before they multiply values. What
    :func:`takes_attention` does not take is PyTorch's. It ``begins_early`` as :func:`early_start` has it.
    """
    if not takes_attention(query, key, value, bias):
        return _by_pytorch(query, key, value, bias)
    return _attention_operator(query, key, value, bias, begins_early).unflatten(2, (query.shape[1], -1)).transpose(1, 2)


@torch.library.custom_op("auxhead::attention", mutates_args=())
def _attention_operator(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, begins_early: bool) -> Tensor:
    """Attend as :func:`attend`, and return [N, T, H * D], dense: what a compiler is given, who knows no launch."""
    if not takes_attention(query, key, value, bias):  # others than those that a compiler has seen
        return _by_pytorch(query, key, value, bias).transpose(1, 2).flatten(2).clone()
    (samples, heads, queries, numbers), keys = query.shape, key.shape[2]
    out = query.new_empty((samples, queries, heads * numbers))
    block_k, block_d = max(next_power_of_2(keys), 16), max(next_power_of_2(numbers), 16)
    block_q = next((each for each in _QUERIES if _programs(query, each) <= _PROGRAMS), _QUERIES[-1])
    with torch.cuda.device_of(query):
        kernel.attention_kernel[(_programs(query, block_q),)](
            query, *query.stride()[:3], key, *key.stride()[:3], value, *value.stride()[:3], bias, *_strides(bias), out,
            heads, queries, keys, 1 if bias is None else len(bias), numbers**-0.5,
            DIM=numbers, BLOCK_Q=block_q, BLOCK_K=block_k, BLOCK_D=block_d,
            num_warps=4 if block_k * block_d < 32_768 else 8, **early_start(query, begins_early),
        )  # fmt: skip
    return out


@_attention_operator.register_fake
def _(query, key, value, bias, begins_early):  # type: ignore[no-untyped-def]
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1] * value.shape[3]))


def _by_pytorch(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    if bias is not None:
        bias = bias.repeat(len(query) // len(bias), 1, 1, 1) if len(bias) > 1 else bias
        bias = F.pad(bias, (0, -bias.shape[-1] % 8))[..., : bias.shape[-1]]  # in rows of 16 bytes, which kernels want
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def _programs(query: Tensor, queries: int) -> int:
    return query.shape[0] * query.shape[1] * -(-query.shape[2] // queries)


def _fits(bias: Tensor, query: Tensor, key: Tensor) -> bool:
    return (
        len(query) % len(bias) == 0
        and bias.shape[1] in (1, query.shape[1])
        and bias.shape[2:] == (query.shape[2], key.shape[2])
    )


def _reach(x: Tensor) -> int:
    """Return how far from the first number of a tensor the last one lies."""
    return sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))


def _strides(bias: Tensor | None) -> tuple[int, ...]:
    """Return the steps of a bias, none from head to head if one is for all."""
    if bias is None:
        return 0, 0, 0, 0
    return tuple(0 if size == 1 else step for size, step in zip(bias.shape, bias.stride(), strict=True))
