"""``train``: trains exits, all together or heads alone; checks all that it is given first."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import NoneType

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..basics.arguments import kind_of
from ..listening.kept import own_random_numbers
from ..network.early_exit_network import EarlyExitNetwork, check_network
from ..processes.process_group import own_rank
from .learners import as_before, check_not_sharded, check_on_one_device
from .plan import TrainingPlan, check_weights
from .training_loop import Epoch, LossNotFinite, Step, Training, TrainingLoop, as_epoch, trains_classifier
from .training_state import seed_all, seed_of


def train(
    network: EarlyExitNetwork,
    batches: Iterable[tuple[Tensor, Tensor]],
    plan: TrainingPlan | None = None,
    *,
    validation: Iterable[tuple[Tensor, Tensor]] | None = None,
    seed: int = 0,
    state: str | os.PathLike[str] | None = None,
    resume: bool = False,
    on_step: Callable[[Step], object] | None = None,
    on_epoch: Callable[[Epoch], object] | None = None,
) -> Training:
    """Train the exits of a network, in place, on the device where it is.

    Nothing else of the network changes: modes, gradients and the memory formats of parameters are afterwards what they
    were (as channels_last, convolutions train a tenth faster: ``network.to(memory_format=torch.channels_last)``
    before). A network in training mode is left in eval mode, in which it answers. Whatever ends the training early, an
    error or an interrupt, leaves parameters and buffers as after the best epoch so far, without ``validation`` the last
    one, or as before where none was done; modes as they were.

    Under torchrun, with a process group, gradients are averaged over all processes (DistributedDataParallel); the
    network and ``seed`` are the same in each, and ``batches`` are each one's part: a DataLoader with a
    DistributedSampler, say. Rank 0 evaluates and writes. Batch norms see each one's part alone.

    Args:
        network: heads that know their width, and parameters in float32, or all in float64, all on one device: a network
            that was split or sharded is refused. Parameters that require no gradient stay as they are, and a backbone
            without any that do stays in eval mode.
        batches: (images [N, ...], labels [N] int64): a DataLoader, or anything else with a length that can be gone
            through again and again. Of a backbone of several arguments ((one, other), labels), or dicts of arguments by
            name that have "labels", or "label", beside them.
        plan: the settings; None for those of ``TrainingPlan()``.
        validation: images that are not learned from. After each epoch every exit answers for all of them; the network
            is left as it was after the epoch with the best mean of their accuracies. Choose thresholds on others.
        seed: of what is drawn: dropout, the order of a DataLoader, transforms. Each epoch seeds the random numbers of
            Python, NumPy and PyTorch anew; outside they go on as before.
        state: a file that gets the state of the training after every epoch; rank 0's, other hosts need none.
        resume: go on where ``state`` ends. The result is that of a training without interruption, bit for bit where
            the device repeats its results, unless workers that outlive an epoch (``persistent_workers``) draw. With
            another learning rate it goes on from the best epoch.
        on_step: called after every batch.
        on_epoch: called after every epoch, in each process.

    Returns:
        The epochs, those before a resumed one among them.

    Raises:
        TypeError, ValueError: arguments or batches that are not as described, or a tap whose output is changed in place
            in training mode.
        BadInput: a network that is split, over devices or with parts on meta, or sharded; with what to do instead. Or a
            ``state`` to resume that is damaged or of another training; or a loss that is no finite number, with
            what it comes from: images, the network, its precision or the learning rate.

    Example:
        >>> backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
        >>> batches = [(torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))) for _ in range(3)]
        >>> network = EarlyExitNetwork(backbone, {"1": FusedAuxHead(8, 5)}, example_input=batches[0][0])
        >>> done = train(network, batches, TrainingPlan(epochs=2))
        >>> len(done.epochs)
        2
    """
    plan = TrainingPlan() if plan is None else plan
    if not isinstance(plan, TrainingPlan):
        raise TypeError(f"plan: got {plan!r:.50}, wants a TrainingPlan or None")
    for name, call in (("on_step", on_step), ("on_epoch", on_epoch)):
        if call is not None and not callable(call):
            raise TypeError(f"{name}: got {kind_of(call)}, wants a function or None")
    if type(seed) is not int or seed < 0:
        raise ValueError(f"seed: got {seed!r}, wants a whole number from 0")
    if not isinstance(state, (str, os.PathLike, NoneType)):
        raise TypeError(f"state: got {kind_of(state)}, wants the path of a file")
    state = None if state is None else Path(state)
    _check_arguments(network, plan, validation, state, resume)
    device = next(network.parameters()).device
    in_training = network.training
    with as_before(network), own_random_numbers(device), torch.inference_mode(False), torch.enable_grad():
        seed_all(seed_of(seed, own_rank()))
        loop = TrainingLoop(network, batches, validation, plan, seed, device)
        try:
            if resume and state is not None:
                loop.resume(state)
            while not loop.is_done():
                loop.train_epoch(on_step or _ignore)
                if state is not None and own_rank() == 0:
                    loop.state.save(state, loop.settings())
                (on_epoch or _ignore)(as_epoch(loop.state.epochs[-1]))
            done = loop.finish()
        except BaseException as error:
            loop.state.kept.put_back()
            if isinstance(error, LossNotFinite) and error.done.epochs:
                loop.finish()
            raise
    if in_training:
        network.eval()
    return done


def _ignore(_done: Step | Epoch) -> None:
    """Do nothing after a step or an epoch."""


def _check_arguments(
    network: EarlyExitNetwork, plan: TrainingPlan, validation: object, state: Path | None, resume: bool
) -> None:
    check_network(network)
    lazy = [tap for tap, head in zip(network.taps, network.heads, strict=True) if any(map(is_lazy, head.parameters()))]
    if lazy:
        raise ValueError(
            f"network: the heads at {lazy} do not know their width yet; call network.check_taps(example_input) before"
        )
    check_on_one_device(network)
    check_not_sharded(network)
    for name, parameter in network.named_parameters():
        if parameter.requires_grad and not is_lazy(parameter) and not parameter.isfinite().all():
            raise ValueError(f"network: its {name} is not all finite numbers, wants no NaN and no infinity")
    kinds = {each.dtype for each in network.parameters() if each.is_floating_point() or each.is_complex()}
    if other := kinds - {torch.float32, torch.float64}:
        raise TypeError(f"network: has parameters of {other.pop()}, wants torch.float32; TrainingPlan has a precision")
    if torch.float64 in kinds and (len(kinds) > 1 or plan.precision != "float32"):  # autocast passes float64 over
        got = " and ".join(sorted(map(str, kinds)))
        raise TypeError(
            f"network: has parameters of {got} for the precision {plan.precision!r}, wants torch.float32; "
            "torch.float64 alone works without autocast, under the precision 'float32'"
        )
    if plan.method == "heads":
        _check_apart(network)
    if plan.weights is not None:
        check_weights(plan.weights, len(network.taps) + trains_classifier(network, plan))
    if plan.patience is not None and validation is None:
        raise ValueError("validation: missing, wants images by which patience can stop the training")
    if state is not None and own_rank() == 0 and (state.is_dir() or not state.parent.is_dir()):
        why = f"{state} is a folder, wants a file" if state.is_dir() else f"{state.parent} is no folder, wants one"
        raise ValueError(f"state: {why} in one that is there")
    if resume and state is None:
        raise ValueError("state: missing, wants the file to resume from")


def _check_apart(network: EarlyExitNetwork) -> None:
    """Raise ``ValueError`` if what heads would learn alone is the backbone's, too, whose features stay as they are."""
    names = {parameter: name for name, parameter in network.backbone.named_parameters()}
    for tap, head in zip(network.taps, network.exit_heads, strict=True):
        for name, parameter in head.named_parameters():
            if parameter.requires_grad and parameter in names:
                raise ValueError(
                    f"heads[{tap!r}]: its {name} is the backbone's {names[parameter]}, too, which the method 'heads' "
                    "leaves as it is; wants requires_grad_(False) for it, or the method 'joint'"
                )
