"""``counted_work``: how many FLOPs are done when each of some layers returns, as a share of a forward's."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from ..batches import Batch, call_with, map_tensors
from ..hooks import ThreadHook

#: Attention of the CPU, which PyTorch's own counter passes over; that of CUDA devices it counts.
_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def counted_work(model: nn.Module, layers: Sequence[str], x: Batch) -> list[float]:
    """Run a model once in eval mode, and return how far it is, from 0 to 1, when each layer returns.

    FLOPs are those of convolutions, products and attention: the same on every device and in every dtype, whatever
    kernels run there. Of a model without any, operators are counted.

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
        if (count := flop_registry.get(getattr(func, "overloadpacket", None))) is not None:
            self.flops += count(*args, **kwargs, out_val=output)
        elif func is _CPU_ATTENTION:
            self.flops += sdpa_flop_count(*(each.shape for each in args[:3]))
        return output
