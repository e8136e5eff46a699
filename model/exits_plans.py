"""``ExitsPlans``: the plans of a network's exits, by which an eager pass on a GPU answers in few launches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.cuda_runtime import may_be_destroyed
from ..kernels.exits_plan import ExitsPlan
from .exit_monitor import ExitMonitor
from .fused_aux_head import FusedAuxHead
from .kept_plans import Kept, KeptPlans, ReadTensors
from .module_head import AuxHead


class ExitsPlans(KeptPlans[ExitsPlan]):
    """Plans of one network by the batch, the stream and whether the host wants to know after each exit who is sure."""

    def find(
        self,
        heads: Sequence[AuxHead],
        classifier: FusedAuxHead | None,
        x: Tensor,
        stream: int,
        *,
        at_each: bool,
        captured: bool,
        monitor: ExitMonitor | None,
    ) -> ExitsPlan | None:
        """Return the plan for a batch on the current stream, given by its handle, too; None if there can be none.

        The stream then comes after all writes to the heads' rules, unless it is being captured. A graph gets a plan of
        its own, whose memory is the graph's: it may run beside others.
        """
        key = (stream, x.shape[0], x.device, at_each, classifier, monitor)
        exits: list[Any] = [*heads] if classifier is None else [*heads, classifier]
        if any(head._forward_hooks or head._forward_pre_hooks for head in exits):  # which a plan would not call
            return None
        if captured:
            made = self._make(exits, classifier, x, monitor, at_each=at_each)
            return None if made is None else made.plan
        kept = self.unchanged(key, exits)
        if kept is None:
            # A plan's launches share memory because one stream runs them one after another; the handle of one that its
            # owner may destroy might become that of another.
            if may_be_destroyed(torch.cuda.current_stream(x.device)):
                return None
            if (kept := self._make(exits, classifier, x, monitor, at_each=at_each)) is None:
                return None
            self.keep(key, kept)
        kept.wait_for_rules(exits, x)
        return kept.plan

    def _make(
        self,
        exits: Sequence[AuxHead],
        classifier: nn.Module | None,
        x: Tensor,
        monitor: ExitMonitor | None,
        *,
        at_each: bool,
    ) -> Kept[ExitsPlan] | None:
        try:
            read = ReadTensors(exits)
        except KeyError:
            return None
        if not read.are_plain():
            return None
        launched = [*(head.as_exit_head() for head in exits), *([None] if classifier is None else [])]
        plan = ExitsPlan(
            launched,
            x.shape[0],
            exits[0].num_classes,
            with_probs=all(head.return_probs for head in exits),
            at_each=at_each,
            device=x.device,
            tallies=None if monitor is None else monitor.tallies_on(x.device, len(launched)),
        )
        return Kept(plan, read)
