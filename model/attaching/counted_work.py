"""``counted_work``: how many FLOPs are done when each of some layers returns, as a share of a forward's."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..batches import Batch, call_with, map_tensors
from ..hooks import ThreadHook

#: Attention in one operator, one of which each device takes. PyTorch's own counter passes over that of the CPU, and
#: fails where several heads of queries share one of keys.
_ATTENTION = frozenset(
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}")
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
)


def counted_work(model: nn.Module, layers: Sequence[str], x: Batch) -> list[float]:
    """Run a model once in eval mode, and return how far it is, from 0 to 1, when each layer returns.

    FLOPs are those of convolutions, products and attention: the same on every device and in every dtype, whatever
    kernels run there, but for attention of CUDA devices that pads heads whose width is no multiple of 8. Of a model
    without any, operators are counted.

    Args:
        model: any module; not changed.
        layers: names of layers that run once.
        x: a batch of any size; tensors on the device ``meta`` do.
    """
    counter = _Counter()
    done: dict[str, tuple[int, int]] = {}
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        for name in layers:
            hook = ThreadHook(partial(_note, done, name, counter))
            stack.callback(model.get_submodule(name).register_forward_hook(hook).remove)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        # Under any mode of functions nn.MultiheadAttention calls its parts one by one, in place of one operator that
        # exists on some devices alone, and of which nobody can tell the FLOPs.
        stack.enter_context(BaseTorchFunctionMode())
        batch = map_tensors(x, torch.clone)  # which the model may change in place
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # of a fullgraph PyTorch 2.14 wants to be told
        stack.enter_context(counter)
        call_with(model, batch)
    kind = 0 if counter.flops else 1
    total = counter.now()[kind]
    return [done[name][kind] / total for name in layers]


def _note(done: dict[str, tuple[int, int]], name: str, counter: "_Counter", *_of_the_layer: Any) -> None:
    done[name] = counter.now()


class _Counter(TorchDispatchMode):
    """Counts FLOPs, and operators that are no views; layers that are compiled run eagerly beneath it."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.operators = 0

    def now(self) -> tuple[int, int]:
        """Return what was counted so far."""
        return self.flops, self.operators

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count it."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self.operators += not getattr(func, "is_view", False)
        # FlopCounterMode itself hooks modules for gradients, which fails on parameters that a layer takes as input.
        kind = getattr(func, "overloadpacket", None)
        if kind in _ATTENTION:
            self.flops += _flops_of_attention(*args[:3])
        elif (count := flop_registry.get(kind)) is not None:
            self.flops += count(*args, **kwargs, out_val=output)
        return output


def _flops_of_attention(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return those of the products of queries and keys, and of scores and values; each is [N, heads, tokens, width]."""
    samples, heads, tokens, width = query.shape
    return 2 * samples * heads * tokens * key.shape[2] * (width + value.shape[3])
