"""``EarlyExitNetwork``: any backbone with early-exit heads behind some of its layers."""

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.cuda.runtime import beside_captures
from ...kernels.launch.check_arguments import check_classes
from ..answers.exit_monitor import ExitMonitor
from ..answers.exit_result import ExitResult
from ..answers.exit_rule import ExitRule, as_exit_rule
from ..basics.arguments import check_heads, check_module, kind_of
from ..basics.bad_input import BadInput
from ..basics.preprocessing import Preprocessing
from ..basics.streams import has_streams
from ..heads.fused_aux_head import FusedAuxHead
from ..heads.given_heads import as_head, check_distinct, unless_of_other_maps
from ..heads.head import AuxHead, HeadRun, check_followed, check_head_device, check_same_classes, with_layout
from ..listening.batches import (
    Batch,
    argument_names,
    arguments_in,
    call_with,
    check_input_batch,
    first_tensor,
    two_samples,
)
from ..listening.dry_run import dry_run
from ..listening.packing import Packing
from ..listening.reading import (
    AUTO,
    LOGITS,
    AnyExtract,
    Extract,
    Reading,
    check_extract,
    reading_of,
    reads_by_mask,
    the_mask,
    with_mask,
)
from ..listening.recording import Recording
from ..listening.taps import listening, version_of, warn_if_checkpointed
from .eager_pass import ExitsRepeats, run_eagerly
from .learned_from import LearnedFrom

#: A dry run hooks every layer and switches modes, so that two at a time would see each other.
_DRY_RUNS = threading.RLock()


class EarlyExitNetwork(nn.Module):
    """A backbone with an early-exit head behind each of some of its layers.

    The backbone is neither traced nor rewritten: while the network runs, forward hooks on the tapped layers hand their
    outputs to the heads. Sample by sample, the first head that is sure answers, and the backbone's own classifier
    answers for whatever is left.

    Example:
        >>> backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
        >>> x = torch.randn(4, 3, 8, 8)
        >>> network = EarlyExitNetwork(backbone, {"1": FusedAuxHead(8, 5)}, rules=0.0, example_input=x).eval()
        >>> network(x).exit_index  # a confidence is always above 0.0
        tensor([0, 0, 0, 0])
    """

    heads: nn.ModuleList
    _monitor: ExitMonitor | None = None
    _preprocessing: Preprocessing | None = None
    own_exits: Mapping[str, Any] | None = None
    """Of a network of :func:`attach_exits`: ``input``, the sizes of a sample, its ``dtype``, and ``final``."""
    learned_from: LearnedFrom | None = None
    """What its weights and rules were made from; None where nobody has noted that: see :func:`learned_by`."""
    unread: Path | None = None
    """File of parameters on meta, from which a part of the network is read when it is placed on a device."""

    def __init__(
        self,
        backbone: nn.Module,
        heads: Mapping[str, nn.Module],
        rules: ExitRule | float | Mapping[str, ExitRule | float] | None = None,
        *,
        example_input: Batch | None = None,
        extract: Mapping[str, AnyExtract] | None = None,
        logits: int | str | None = None,
    ) -> None:
        """Attach heads to a backbone.

        Args:
            backbone: any module that turns a batch into logits [N, K], or into a tuple, dict or object that has them;
                the network takes over its mode.
            heads: for each tap, the name of a layer (``backbone.get_submodule``), in the order in which they run: a
                :class:`FusedAuxHead`, or an ``nn.Sequential`` that :meth:`FusedAuxHead.from_module` knows, or any other
                module that makes logits [N, K] of what the layer returns: it becomes a :class:`ModuleHead`, which is
                not fused. A head made with ``in_features=None`` takes its width from the dry run.
            rules: a rule or threshold for all heads (each gets its own copy) or by tap; None leaves the heads' own.
            example_input: a batch for the dry run that checks the taps; without one, the first batch serves. For a
                backbone of several arguments a tuple of them, or a dict by name; see :meth:`forward`.
            extract: for taps that do not return just what their head is to read, an :class:`Extract` (an item of a
                tuple or dict, a layout, a padding mask), or a function of the layer's output that returns it, called at
                each pass. Layouts of other taps are inferred from the operators around them, and masks found by name.
            logits: index, key or field of the logits in what the backbone returns; None is all of it, if that is a
                tensor, and else its field "logits".

        Raises:
            ValueError: a tap or head that cannot work; the message names layers that would have worked.
            TypeError: an argument of another type, or a head that is no module.
        """
        super().__init__()
        check_module("backbone", backbone)
        check_heads(heads)
        self.backbone = backbone
        self.taps = tuple(heads)
        self.heads = nn.ModuleList(as_head(tap, head) for tap, head in heads.items())
        check_distinct(heads)
        self._windowed: dict[nn.Module, nn.Module] = {  # what heads were made of that read maps of one size alone
            head: given
            for head, given in zip(self.exit_heads, heads.values(), strict=True)
            if head.map_size is not None and head is not given
        }
        by_tap = None if rules is None else self._rules_by_tap(rules)
        self.argument_names = argument_names(backbone)
        """Of the backbone, as far as known."""
        self.extract = check_extract(extract, self.taps)
        if isinstance(logits, bool) or not (logits is None or isinstance(logits, (int, str))):
            raise TypeError(f"logits: got {kind_of(logits)}, wants an index, a key or None")
        self.logits_part = logits
        self.shares: dict[str, float] = {}
        """Of the backbone's work, how much is done when a tap returns, 0 to 1; of taps of which that is known."""
        self.placement_note = ""
        """What ``attach`` could not place as it promises, in words."""
        self._of_tokens: set[str] = set()  # taps, once they are checked
        self.reading = reading_of(self.taps, self.extract, self.logits_part)
        self._checked: list[nn.Module] = []  # heads with their layers, as they were
        self._repeats = ExitsRepeats()
        if example_input is not None:
            self.check_taps(example_input)
        if by_tap is not None:  # of heads that were not refused
            self.set_rules(by_tap)
        self.training = self.heads.training = backbone.training
        for head in self.heads:
            if head.training != backbone.training:  # layers of its own may have other modes
                head.train(backbone.training)

    def train(self, mode: bool = True) -> "EarlyExitNetwork":
        """Set the mode, but leave a frozen backbone (none of its parameters requires a gradient) in eval mode.

        Its batch norms would change while heads alone are trained, and with them every answer. To train it so all the
        same, call ``backbone.train()`` afterwards.
        """
        self.backbone.train(mode)  # first: one that refuses leaves all as it was
        super().train(mode)
        if mode and not any(parameter.requires_grad for parameter in self.backbone.parameters()):
            self.backbone.eval()
        return self

    @property
    def monitor(self) -> ExitMonitor | None:
        """Counts the answers, if there is one: see :class:`ExitMonitor`; that of other exits is refused."""
        return self._monitor

    @monitor.setter
    def monitor(self, monitor: ExitMonitor | None) -> None:
        if not (monitor is None or isinstance(monitor, ExitMonitor)):
            raise TypeError(f"network.monitor: got {kind_of(monitor)}, wants an ExitMonitor or None")
        if monitor is not None and len(monitor.shares) != len(self.taps) + 1:
            wants = f"{len(self.taps) + 1}: heads and the classifier"
            raise ValueError(f"network.monitor: has shares of {len(monitor.shares)} exits, wants {wants}")
        self._monitor = monitor

    @property
    def preprocessing(self) -> Preprocessing | None:
        """How pictures become its input; None of networks of other things, or where nobody has said it."""
        return self._preprocessing

    @preprocessing.setter
    def preprocessing(self, preprocessing: Preprocessing | None) -> None:
        if not (preprocessing is None or isinstance(preprocessing, Preprocessing)):
            wants = "a Preprocessing or None: Preprocessing.of_weights(ResNet50_Weights.DEFAULT), say"
            raise TypeError(f"network.preprocessing: got {kind_of(preprocessing)}, wants {wants}")
        self._preprocessing = preprocessing

    @property
    def exit_heads(self) -> list[AuxHead]:
        """The heads, in the order of the taps."""
        return [head for head in self.heads if isinstance(head, AuxHead)]  # check_taps refuses others

    @property
    def fused_heads(self) -> list[FusedAuxHead]:
        """The heads that are fused, in the order of the taps."""
        return [head for head in self.heads if isinstance(head, FusedAuxHead)]

    @property
    def device(self) -> torch.device:
        """Where the heads are."""
        return self.exit_heads[0].rule.threshold_tensor.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters, those of the heads before others."""
        parameters = (*self.heads.parameters(), *self.backbone.parameters())
        return next((each.dtype for each in parameters if each.is_floating_point()), torch.float32)

    def set_rules(self, rules: ExitRule | float | Mapping[str, ExitRule | float]) -> None:
        """Give the heads other rules, all of them or by tap; a number changes the threshold alone.

        The values are written into the rules that the heads have, in place, so that captured graphs follow them.
        """
        for tap, rule in self._rules_by_tap(rules).items():
            self.exit_heads[self.taps.index(tap)].rule.assign(rule)

    def _rules_by_tap(self, rules: ExitRule | float | Mapping[str, ExitRule | float]) -> Mapping[str, ExitRule | float]:
        if not isinstance(rules, (Mapping, ExitRule, int, float)):
            wants = "an ExitRule or a threshold (a float), or a dict of them by tap"
            raise TypeError(f"rules: got {kind_of(rules)}, wants {wants}")
        by_tap = rules if isinstance(rules, Mapping) else dict.fromkeys(self.taps, rules)
        for tap, rule in by_tap.items():
            if tap not in self.taps:
                raise ValueError(f"rules: {tap!r} is not a tap, wants one of {list(self.taps)}")
            own = self.exit_heads[self.taps.index(tap)].rule
            as_exit_rule(rule, f"rules[{tap!r}]", own.criterion)  # refuses what is none before any head is changed
        return by_tap

    def reading_for(self, x: Batch) -> Reading:
        """Return how a batch is read in the current mode: in training some backbones return more than logits."""
        reading = self.reading or Reading((None,) * len(self.taps), None)
        if self.backbone.training and self.logits_part is None:
            reading = reading._replace(logits=LOGITS)
        if isinstance(x, Tensor) or not self._of_tokens:
            return reading
        arguments, reads = arguments_in(x, self.argument_names), list(reading.taps)
        for index, read in reads_by_mask(self.taps, self.exit_heads, self.extract).items():
            reads[index] = partial(read, arguments)
        return reading._replace(taps=tuple(reads))

    def reading_for_rows(self, packing: Packing) -> Reading:
        """Return how the batches are read that a packing has packed into rows."""
        reading = self.reading or Reading((None,) * len(self.taps), None)
        by_mask = reads_by_mask(self.taps, self.exit_heads, self.extract)
        reads = [
            by_mask.get(index, read and (lambda _arguments, output, read=read: read(output)))
            for index, read in enumerate(reading.taps)
        ]
        return Reading(
            tuple(reads), reading.logits, lambda rows: arguments_in(packing.unpack(rows), self.argument_names)
        )

    def mask_in(self, x: Batch) -> tuple[str, Tensor] | None:
        """Return the name and the mask [N, T] by which heads leave padding out of a batch; None if there is no one.

        Where no head reads by a mask it is the one that is called so; its name begins with "~" if it says the opposite.
        """
        return None if isinstance(x, Tensor) else the_mask(self.extract, arguments_in(x, self.argument_names))

    def check_taps(self, example_input: Batch, recorded: Recording | None = None) -> None:
        """Check taps and heads by one dry run of the backbone, the first time and when heads were put in since.

        ``recorded`` is a forward for two samples of the batch, in place of the dry run. See ``__init__`` for what it
        raises.
        """
        if not self._is_checked():
            self._check_taps_once(example_input, recorded)

    def _is_checked(self) -> bool:
        """Return whether the heads and their layers are those that were checked, or of a replica of DataParallel."""
        if torch.compiler.is_compiling() or "_is_replica" in self.__dict__:
            return len(self._checked) > 0
        return self._checked == self._heads_now()

    def _heads_now(self) -> list[nn.Module | None]:
        heads = self._modules["heads"]._modules.values()  # type: ignore[union-attr]
        return [part for head in heads if head is not None for part in (head, *head._modules.values())]

    @torch.compiler.disable(reason="check_taps, or an example_input, has to come before torch.compile(fullgraph=True)")
    def _check_taps_once(self, example_input: Batch, recorded: Recording | None) -> None:
        check_input_batch("example_input", example_input)
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                "network: its taps are not checked yet, which no transform of torch.func can do; wants "
                "network.check_taps(x) before, for a batch x outside of them"
            )
        beside = beside_captures() if has_streams(first_tensor(example_input)) else nullcontext()
        with _DRY_RUNS, beside, torch.inference_mode(False):  # lazy parameters made in it could not be trained
            if not self._is_checked():
                self._check_taps(example_input, recorded)

    def _keeps_compiler_out(self) -> bool:
        """Return whether Dynamo traces this, and would have a head read before a user's hook has changed an output."""
        if not torch.compiler.is_dynamo_compiling():
            return False
        layers = [self.backbone.get_submodule(tap) for tap in self.taps]
        return any(len(layer._forward_hooks) > 0 for layer in (self.backbone, *layers))

    @torch.compiler.disable(reason="a layer that is read carries forward hooks, which have to come before its heads")
    def _uncompiled(self, call: Callable[..., Any], x: Batch, **options: bool) -> Any:
        return call(self, x, **options)

    def _check_first(self, x: Batch) -> None:
        """Check a batch, and by the first one the taps; an empty one gets an empty answer and says nothing of them."""
        check_input_batch("x", x, may_be_empty=True)
        if first_tensor(x).shape[0]:
            self.check_taps(x)

    def _check_taps(self, example_input: Batch, recorded: Recording | None) -> None:
        if len(self.heads) != len(self.taps):
            raise ValueError(f"heads: got {len(self.heads)}, wants {len(self.taps)}, one for each of {list(self.taps)}")
        for tap, head in zip(self.taps, self.heads, strict=True):
            if as_head(tap, head) is not head:
                wants = "a FusedAuxHead, which FusedAuxHead.from_module makes of some modules, or a ModuleHead"
                raise TypeError(f"heads[{tap!r}]: got {kind_of(head)}, wants {wants}")
        device = first_tensor(example_input).device.type
        autocasts = device != "meta" and torch.is_autocast_enabled(device)
        extract = dict(self.extract)
        two = recorded or two_samples(example_input)
        run = dry_run(self.backbone, self.taps, two, extract=self.extract, logits=self.logits_part)
        check_classes("backbone", run.logits.shape[1])
        samples, takes = first_tensor(example_input).shape[0], self.argument_names
        arguments = arguments_in(example_input, takes)
        heads = [
            unless_of_other_maps(head, self._windowed.get(head), features)
            for head, features in zip(self.exit_heads, run.features, strict=True)
        ]
        found: list[tuple[AuxHead, Tensor, HeadRun | None]] = []
        for tap, head, features, channels in zip(self.taps, heads, run.features, run.channels, strict=True):
            given = self.extract.get(tap, Extract())
            if features.is_meta:  # where a backbone may be that is too large for the device of its heads
                features = torch.zeros_like(features, device=head.rule.threshold_tensor.device)
            check_head_device(tap, head, features)
            if isinstance(given, Extract):
                read = with_layout(tap, given, features, head, channels)
                features = read.view(features) if given.layout is None else features
                tokens = (samples, features.shape[1]) if features.ndim == 3 and head.pool != "none" else None
                extract[tap] = with_mask(tap, read, tokens, arguments, takes)
            shown = head.check_on(tap, features, autocasts=autocasts)
            check_same_classes(tap, head.num_classes if shown is None else shown.num_classes, run.logits)
            found.append((head, features, shown))
        for index, (head, features, shown) in enumerate(found):  # once none is refused
            self.heads[index] = head
            if head.rule.threshold_tensor.device != features.device:  # its layers were moved, and it was not
                head.rule.to_empty(device=features.device)
            head.settle(shown, features, autocasts=autocasts)
        self._windowed = {}
        self.extract, self.logits_part = extract, run.part
        self._of_tokens = {tap for tap, read in zip(self.taps, run.features, strict=True) if read.ndim == 3}
        self.reading = reading_of(self.taps, self.extract, self.logits_part)
        self._checked = self._heads_now()  # type: ignore[assignment]

    def describe(self) -> str:
        """Say in a line each how pictures are prepared, and where the heads are and what they read, once checked."""
        lines = [] if self.preprocessing is None else [self.preprocessing.describe()]
        for tap, head in zip(self.taps, self.exit_heads, strict=True):
            extract = self.extract.get(tap, Extract())
            reads = extract.describe(tap) if isinstance(extract, Extract) else f"a function of {tap}"
            mask = extract.mask if isinstance(extract, Extract) else None
            over = "all tokens, padding included" if mask in (None, AUTO) else f"the tokens of {mask}"
            over = f", over {over}" if tap in self._of_tokens else ""
            if mask in (None, AUTO) and head.pool == "first":
                over = ""
            share = f", behind {self.shares[tap]:.0%} of the work" if tap in self.shares else ""
            lines.append(f"{reads}: {head.describe()}{over}{share}")
        return "\n".join([*lines, *filter(None, [self.placement_note])])

    def forward(self, x: Batch, *, stop: bool = False) -> ExitResult:
        """Answer for a batch, eagerly: all that the backbone and every head say of it, merged.

        Args:
            x: a batch that the backbone takes: a tensor; a tuple of its arguments or a dict of its keywords, the first
                tensor of which tells samples and device.
            stop: leave the forward as soon as every sample is sure; see :func:`run_eagerly`.
        """
        if self._keeps_compiler_out():
            return self._uncompiled(EarlyExitNetwork.forward, x, stop=stop)  # of a subclass that calls this one
        self._check_first(x)
        try:
            return run_eagerly(
                self.backbone,
                self.taps,
                self.exit_heads,
                x,
                stop=stop,
                repeats=self._repeats,
                monitor=self.monitor,
                reading=self.reading_for(x),
            )
        except RuntimeError as error:
            devices = sorted({str(each.device) for each in self.parameters()})
            if len(devices) == 1 or "same device" not in str(error):
                raise
            raise BadInput(
                f"network: its parameters are on {', '.join(devices)}, as parallelize and pipelined place them; "
                "wants their runner to be called, or network.to('cuda') before, which moves all back"
            ) from error

    def logits(self, x: Batch) -> list[Tensor]:
        """Return the logits [N, K] of every head and, last, of the classifier; differentiable, for training.

        Heads train where the backbone runs without gradients or is checkpointed, too: they come after it. A layer under
        reentrant checkpointing gets no gradients from its head, and a warning says so.

        Args:
            x: a batch, as :meth:`forward` takes it.

        Raises:
            ValueError: a tap's output is changed in place later in the forward, as by a dropout in training mode alone;
                or a head has hooks, or a forward of its own, that its answers alone would follow.
        """
        if self._keeps_compiler_out():
            return self._uncompiled(EarlyExitNetwork.logits, x)
        self._check_first(x)
        check_followed(self.taps, self.exit_heads)
        features: list[tuple[Tensor, torch.autocast, int | None]] = []
        differentiable = torch.is_grad_enabled()

        def keep(index: int, y: Tensor) -> None:
            kind = y.device.type  # a backbone may enter autocast by itself
            autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            features.append((y, autocast, version_of(y)))
            if differentiable and not torch.is_grad_enabled():
                warn_if_checkpointed(self.taps[index])

        with listening(self.backbone, self.taps, keep, self.reading_for(x)):
            final = call_with(self.backbone, x)
        check_same_classes(self.taps[0], self.exit_heads[0].num_classes, final)
        for tap, (y, _, version) in zip(self.taps, features, strict=True):
            if version is not None and version_of(y) != version:  # None where Dynamo traced the layer
                raise ValueError(
                    f"heads: the output of layer {tap!r} is changed in place later (by a dropout or ReLU with "
                    "inplace=True, say, in training mode alone), before its head has read it; tap the layer that "
                    "changes it, or make that one inplace=False"
                )
        logits = []
        for head, (y, autocast, _) in zip(self.exit_heads, features, strict=True):
            with autocast:
                logits.append(head.logits(y))
        return [*logits, final]


def check_network(network: object) -> None:
    """Raise ``TypeError`` unless an argument is a network."""
    if not isinstance(network, EarlyExitNetwork):
        own = isinstance(getattr(network, "network", None), EarlyExitNetwork)
        raise TypeError(f"network: got {kind_of(network)}, wants an EarlyExitNetwork{', its .network' if own else ''}")


def check_model(model: object) -> None:
    """Raise ``TypeError`` unless a model is a module, and one that has no heads of ours yet; or it is compiled."""
    check_module("model", model)
    if isinstance(model, torch._dynamo.OptimizedModule):
        kind = type(model._orig_mod).__name__
        raise ValueError(
            f"model: is a compiled {kind}, whose layers cannot be seen; wants the module behind it, model._orig_mod"
        )
    if isinstance(model, EarlyExitNetwork):
        raise TypeError("model: got an EarlyExitNetwork, wants a model without heads, as its network.backbone")
