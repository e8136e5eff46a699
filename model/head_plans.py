"""``HeadPlans``: the plans of one head, used again as long as nothing that they rest on has changed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels import HeadOutput, runs_triton
from ..kernels.arrival_counters import arrival_counters
from ..kernels.cuda_runtime import is_capturing
from ..kernels.head_backward import follow_differentiably
from ..kernels.head_plan import CpuPlan, HeadPlan, LaunchPlan, is_followed
from ..kernels.layer_arguments import launched_parameters
from ..kernels.noted_launch import NotedLaunch, noting
from .kept_plans import Kept, KeptPlans, ReadTensors
from .rule_order import count_writes
from .streams import current_handle, has_streams


class HeadPlans(KeptPlans[HeadPlan]):
    """Plans of one head by the layout of the input and the stream."""

    def answer(self, head: Any, x: Tensor, call: Callable[[Tensor], HeadOutput]) -> HeadOutput:
        """Answer by a plan, or by ``call``, what it launches then being the plan of next time."""
        if not is_plain_call(x):
            return call(x)
        stream = 0
        if has_streams(x):
            if torch.cuda.current_device() != x.device.index or is_capturing(x.device):
                return call(x)
            stream = current_handle(x.device)
        key = (stream, x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)
        kept = self.unchanged(key, [head])
        if kept is not None:
            kept.wait_for_rules([head], x)
            if torch.is_grad_enabled() and (x.requires_grad or any(one.requires_grad for one in kept.read.parameters)):
                linear, rule = head.linear, head.rule
                return follow_differentiably(
                    kept.plan, x, linear.weight, linear.bias, rule.temperature_tensor, head.hidden_layers(),
                    pool=head.pool, pool_size=head.pool_size, criterion=rule.criterion, return_probs=head.return_probs,
                )  # fmt: skip
            return kept.plan(x)
        writes = count_writes()
        with noting() as launches:
            output = call(x)
        try:
            read = ReadTensors([head])
        except KeyError:
            return output
        plan = _plan_of(head, x, stream, launches, read) if read.are_plain() else None
        if plan is not None:
            self.keep(key, Kept(plan, read, writes))
        return output


def is_plain_call(x: Tensor) -> bool:
    """Return whether a tensor lies in memory as it seems, and nobody follows or changes operations on it."""
    return not (
        is_followed()
        or x.layout is not torch.strided
        or x.is_nested
        or not (x.is_cuda or x.is_cpu)
        or torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
        or x.is_neg()
        or x._is_zerotensor()  # which has no memory
        or not x.ndim
        or not x.shape[0]
    )


def _plan_of(head: Any, x: Tensor, stream: int, launches: list[NotedLaunch], read: ReadTensors) -> HeadPlan | None:
    """Make a plan of a call that was made, with the tensors that were read after it; None if none can be made."""
    if not runs_triton(x):
        if not x.is_cpu:
            return None
        linear, rule = head.linear, head.rule
        return CpuPlan(
            linear.weight, linear.bias, rule.temperature_tensor, rule.threshold_tensor,
            pool=head.pool, pool_size=head.pool_size, criterion=rule.criterion, return_probs=head.return_probs,
            hidden=head.hidden_layers(),
        )  # fmt: skip
    if len(launches) != 1 or not arrival_counters(x.device).are_kept(stream):
        return None
    given = launches[0].given()
    launched = [*launched_parameters(given), given["temperature"], given["threshold"]]
    if [one.data_ptr() for one in launched] != read.addresses:  # another thread's are there now
        return None
    return LaunchPlan(launches[0], x, stream)
