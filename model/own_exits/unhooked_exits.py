"""``UnhookedExits``: a module that returns the logits of all exits of an earlyon network, whose heads run in hooks.

earlyon (https://github.com/sohams25/earlyon, 0.3) binds its heads to one wrapper: hooks on the backbone's layers call
them, and hand on logits in ``mode="training"`` alone. It is told by what its wrapper has, and never imported.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..answers.exit_rule import ExitRule
from ..heads.fused_aux_head import FusedAuxHead
from ..listening.kept import shallow_copy
from ..listening.reading import AnyExtract, Extract, Reading
from ..listening.rounding import double_copy, in_double, truth_of
from ..listening.taps import listening
from ..network.early_exit_network import EarlyExitNetwork
from .find_exits import refuse_if_off
from .silenced_model import SilencedModel


def attach_unhooked(
    wrapper: nn.Module,
    two: Tensor,
    rules: ExitRule | float | Mapping[str, ExitRule | float] | None,
    attach: Callable[["UnhookedExits", int], EarlyExitNetwork],
) -> EarlyExitNetwork:
    """Make a network of an earlyon wrapper: of its backbone and its heads, if all of those can be fused whole.

    Args:
        wrapper: of which :func:`is_earlyon` is true.
        two: samples.
        rules: None are the wrapper's own.
        attach: makes a network of a model that returns its exits, of which the last one has this index.
    """
    own = UnhookedExits(wrapper)
    with torch.inference_mode(False):
        network = own.fused(two)
    places: Sequence[Any] = range(len(own.rules))
    if network is None:
        network = attach(own, len(own.rules))
        assert isinstance(network.backbone, SilencedModel)
        places = [one.place for one in network.backbone.exits[:-1]]
    if rules is None:
        rules = {tap: own.rules[place] for tap, place in zip(network.taps, places, strict=True)}
    network.set_rules(rules)
    return network


class UnhookedExits(nn.Module):
    """x -> the logits [N, K] of each head and, last, of the classifier, divided by its temperature."""

    def __init__(self, wrapper: Any) -> None:
        """Copy backbone and heads without the wrapper's hooks; the parameters are the wrapper's own."""
        super().__init__()
        config = wrapper.config
        config.validate()
        names = [point.name for point in config.exit_points]
        adapters = [wrapper._feature_adapters.get(name) for name in names]
        copies: dict[nn.Module, nn.Module] = {}
        self.backbone = _without_hooks(wrapper, copies)
        self.heads = nn.ModuleList(shallow_copy(wrapper.exit_heads[name], copies) for name in names)
        self.eval()
        self.taps = tuple(point.layer_name for point in config.exit_points)
        self.rules = tuple(_rule(config, index) for index in range(len(names)))
        self._reading = Reading(tuple(adapters), None)
        self._final, self._temperature = wrapper._final_classifier, config.temperatures["final"]

    def forward(self, x: Tensor) -> list[Tensor]:
        """Run the backbone, and each head as its layer returns."""
        logits: list[Tensor] = []
        with listening(self.backbone, self.taps, lambda index, y: logits.append(self.heads[index](y)), self._reading):
            features = self.backbone(x)
        return [*logits, _finished(features, self._final, self._temperature)]

    @torch.no_grad()
    def fused(self, example: Tensor) -> EarlyExitNetwork | None:
        """Return a network of the backbone and of fused heads that share the heads' parameters, without rules.

        None if there is a head that cannot be fused whole; ``ValueError`` if it says something else.
        """
        ranks: list[int] = []
        with listening(self.backbone, self.taps, lambda _index, y: ranks.append(y.ndim), self._reading):
            features = self.backbone(example.clone())
        try:
            fused = [_fused(head, rank) for head, rank in zip(self.heads, ranks, strict=True)]
        except ValueError:
            return None
        extract: dict[str, AnyExtract] = {}
        for tap, rank, adapter in zip(self.taps, ranks, self._reading.taps, strict=True):
            if adapter is not None:
                extract[tap] = adapter
            elif rank > 2:
                extract[tap] = Extract(layout="NCHW" if rank == 4 else "NTD")
        backbone, prefix = self.backbone, ""
        if self._temperature != 1.0 or self._final(features) is not features:
            backbone, prefix = Finished(backbone, self._final, self._temperature).eval(), "backbone."
        network = EarlyExitNetwork(
            backbone,
            {f"{prefix}{tap}": head for tap, head in zip(self.taps, fused, strict=True)},
            example_input=example,
            extract={f"{prefix}{tap}": each for tap, each in extract.items()},
        )
        exact, allowed = truth_of(self(example), lambda: double_copy(self)(in_double(example)))
        refuse_if_off(network.logits(example.clone()), exact, allowed, "with fused heads its exits are")
        return network


class Finished(nn.Module):
    """x -> logits [N, K]: a backbone, the wrapper's own last step, and the temperature of its classifier."""

    def __init__(self, backbone: nn.Module, final: Callable[[Any], Tensor], temperature: float) -> None:
        """Hold a backbone whose output ``final`` makes logits of."""
        super().__init__()
        self.backbone = backbone
        self._final = final
        self._temperature = temperature

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits divided by the temperature, whose softmax is what the wrapper is sure by."""
        return _finished(self.backbone(x), self._final, self._temperature)


def _finished(features: Any, final: Callable[[Any], Tensor], temperature: float) -> Tensor:
    logits = final(features)
    return logits if temperature == 1.0 else logits / temperature


def _without_hooks(wrapper: Any, copies: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a copy of a wrapper's backbone on which there are all hooks but the wrapper's."""
    backbone = shallow_copy(wrapper.backbone, copies)
    own = {handle.id for handle in wrapper._hook_handles}
    for layer in backbone.modules():
        for key in own & layer._forward_hooks.keys():
            del layer._forward_hooks[key]
    return backbone


def _fused(head: nn.Module, rank: int) -> FusedAuxHead:
    """Return a head as a fused one; ``ValueError`` if there is none that computes the same."""
    classifier, tokens = getattr(head, "classifier", None), getattr(head, "pool_tokens", None)
    if not isinstance(classifier, nn.Sequential) or tokens not in ("cls", "mean"):
        return FusedAuxHead.from_module(head)  # one of the user's own
    pooled = rank == 4 or rank == 3 and tokens == "mean"
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten()) if pooled else ()
    fused = FusedAuxHead.from_module(nn.Sequential(*pool, *classifier).eval())
    if rank == 3 and not pooled:
        fused.pool = "first"
    return fused


def _rule(config: Any, index: int) -> ExitRule:
    """Return the rule of one exit: confidence >= threshold, or an entropy in nats <= threshold, as an ExitRule."""
    enabled, temperature = config.enabled_exits[index], config.temperatures[config.exit_points[index].name]
    if config.routing_policy == "confidence":
        threshold, criterion = config.confidence_thresholds[index], "max_prob"
    elif config.routing_policy == "entropy":
        largest = math.log(max(config.num_classes, 2))
        threshold, criterion = 1.0 - config.entropy_thresholds[index] / largest, "entropy"
        if threshold <= 0.0:  # everyone leaves, those of whom the head knows nothing too
            threshold, criterion = 0.0, "max_prob"
    else:
        raise ValueError(f"model: routes by {config.routing_policy!r}, wants 'confidence' or 'entropy'")
    return ExitRule(_below(threshold), criterion=criterion, temperature=temperature, enabled=enabled)


def _below(threshold: float) -> float:
    """Return the largest float32 from 0 that is less: what exceeds it in float32 is at least ``threshold``."""
    nearest = torch.tensor(threshold, dtype=torch.float32)
    return (torch.nextafter(nearest, torch.tensor(0.0)) if nearest.item() >= threshold else nearest).item()
