"""The network of ``auxhead train``, and how pictures become its input: a factory's, or torchvision's or timm's."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..attach import attach
from ..basics.bad_input import BadInput, one_line
from ..basics.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing, resize_for
from ..listening.batches import NotTaken
from ..listening.kept import modes_kept
from ..network.early_exit_network import EarlyExitNetwork
from ..network.learned_from import LearnedFrom, fingerprint
from ..training.sources import LabelledImages
from .user_model import TIMM, TORCHVISION, is_of_torchvision, load_factory, named_backbone

#: The weights that torchvision and timm recommend.
DEFAULT = "DEFAULT"
#: Of torchvision's classifiers those whose weights come with another input and without the exits they are made with.
_OTHERWISE_MADE = ("googlenet", "inception_v3")


def make_network(asked: SimpleNamespace, source: LabelledImages) -> tuple[EarlyExitNetwork, str, str]:
    """Return the network for images, by the seed or with weights, the name of what makes its backbone, and what to say.

    Its preprocessing is that of its weights or its factory, or torchvision's usual one, as far as options do not say
    otherwise. ``BadInput`` for options that no network can be made of.
    """
    with torch.random.fork_rng():
        torch.manual_seed(asked.seed)
        if asked.model is not None:
            return _of_factory(asked, source), str(asked.model), ""
        return _attached(asked, source)


def _of_factory(asked: SimpleNamespace, source: LabelledImages) -> EarlyExitNetwork:
    network, example = load_factory(asked.model)()
    shape = list(example.shape)
    if len(shape) != 4 or shape[1] not in (1, 3) or shape[2] != shape[3]:
        raise BadInput(f"--model: {asked.model} returned a batch {shape}, wants [N, 3, size, size], or [N, 1, ...]")
    network.check_taps(example)
    found, classes = network.exit_heads[0].num_classes, len(source.classes)
    if found != classes:
        raise BadInput(f"--model: {asked.model} has {found} classes, wants {classes}, as the images have")
    usual = network.preprocessing or _usual(source, shape[-1], shape[1])
    network.preprocessing = prepare = _as_asked(asked, usual)
    if prepare.channels != shape[1]:
        raise BadInput(f"--channels: got {prepare.channels}, wants {shape[1]}, as {asked.model} takes")
    if prepare.crop != shape[-1]:
        try:
            with torch.no_grad(), modes_kept(network):
                network.eval().logits(example.new_zeros(2, shape[1], prepare.crop, prepare.crop))
        except (RuntimeError, ValueError) as error:
            raise BadInput(f"--crop: {asked.model} cannot take {prepare.crop} pixels: {one_line(error)}") from None
    return network


def _attached(asked: SimpleNamespace, source: LabelledImages) -> tuple[EarlyExitNetwork, str, str]:
    """Attach heads to a classifier of torchvision or timm; returns its name and what weights leave of it, too."""
    name, taps = str(asked.backbone), asked.tap
    full = name if name.startswith(TIMM) else TORCHVISION + name
    if not (name.startswith(TIMM) or is_of_torchvision(name)):
        yours = "; a function of yours is --model" if ":" in name else ""
        wants = "a classifier of torchvision.models, resnet18 say, or timm:NAME"
        raise BadInput(f"--backbone: got {name!r}, wants {wants}{yours}")
    channels = asked.channels or (1 if 1 in [len(given) for given in (asked.mean, asked.std) if given] else 3)
    backbone = named_backbone(full, len(source.classes), channels, "--backbone")
    usual, state = _weights(asked, full, backbone, source, channels)
    preprocessing = _as_asked(asked, usual)
    fresh = None if state is None else _load(backbone, state, f"--weights: {asked.weights}", name)
    example = torch.zeros(2, preprocessing.channels, preprocessing.crop, preprocessing.crop)
    if asked.method == "heads":  # the weights stay, but for a classifier of other classes, which is new
        if fresh is not None and not isinstance(backbone.get_submodule(fresh), nn.Linear):
            kind = type(backbone.get_submodule(fresh)).__name__
            wants = "wants a linear one, weights of as many classes as the images have, or --method joint"
            raise BadInput(f"--method: heads trains no new classifier that is a {kind}, as that of {name}: {wants}")
        for layer, parameter in backbone.named_parameters():
            parameter.requires_grad_(fresh is not None and layer.rpartition(".")[0] == fresh)
    try:
        network = attach(backbone, taps or "auto", example_input=example)
    except NotTaken as error:
        why = one_line(error.__cause__)
        raise BadInput(f"--crop: {name} cannot take {preprocessing.crop} pixels: {why}") from None
    except (ValueError, TypeError) as error:
        raise BadInput(f"--tap: {name} with {', '.join(taps or ()) or 'none'}: {error}") from None
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # trains a tenth faster
    network.preprocessing = preprocessing
    # Registered weights are taken to have seen none of the user's images, who can say otherwise (--train-data).
    is_own = state is not None and Path(asked.weights).suffix != ""
    unknown = "the weights of its backbone were trained on images that nobody has noted" if is_own else None
    network.learned_from = LearnedFrom(unknown, fingerprint(network))
    said = "" if state is None else f"With weights {asked.weights}; the classifier is "
    said += "" if state is None else "theirs, of as many classes.\n" if fresh is None else f"new: {fresh}.\n"
    return network, full, said


def _weights(
    asked: SimpleNamespace, full: str, backbone: nn.Module, source: LabelledImages, channels: int
) -> tuple[Preprocessing, Mapping[str, Tensor] | None]:
    """Return how pictures were prepared for the weights that are asked for, and these; None where there are none."""
    name, weights = full.partition(":")[2], asked.weights
    if full.startswith(TIMM):
        try:
            usual = Preprocessing.of_timm(backbone)
        except ValueError as error:
            raise BadInput(f"--backbone: {full}: {str(error).removeprefix('model: ')}") from None
        if weights == DEFAULT:
            return usual, _of_hub(name, channels)
    else:
        usual = _usual(source, 224, channels)
        known = {one.name: one for one in _registered(name)}
        if weights == DEFAULT and known:
            weights = _registered(name).DEFAULT.name
        if weights in known:
            if name in _OTHERWISE_MADE:
                wants = "another backbone, or yours by --model"
                raise BadInput(f"--weights: those of {name} want another input than its images, wants {wants}")
            return Preprocessing.of_weights(known[weights]), _downloaded(known[weights])
    if weights is None:
        return usual, None
    if Path(weights).suffix not in (".safetensors", ".pth", ".pt", ".bin"):
        names = [DEFAULT] if full.startswith(TIMM) else [DEFAULT, *known]
        raise BadInput(f"--weights: got {weights!r}, wants {', '.join(names)}, or a .safetensors or .pth file")
    return usual, _read(Path(weights))


def _registered(name: str) -> Any:
    from torchvision.models import get_model_weights

    return get_model_weights(name)


def _downloaded(weights: Any) -> Mapping[str, Tensor]:
    """Return registered weights, from torch.hub's cache or the network."""
    folder = Path(torch.hub.get_dir(), "checkpoints")
    try:
        found: Mapping[str, Tensor] = weights.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:  # no network; another file than was published
        file = folder / Path(weights.url).name
        raise BadInput(
            f"--weights: {weights} is not at {file}, and {weights.url} cannot be fetched ({one_line(error)}); wants a "
            "connection, that file there, or --weights FILE"
        ) from None
    return found


def _of_hub(name: str, channels: int) -> Mapping[str, Tensor]:
    """Return what timm recommends for a model, from its cache or the network."""
    import timm

    try:
        made = timm.create_model(name, pretrained=True, in_chans=channels)
    except Exception as error:  # of several libraries: no network, no such file, nothing published
        from huggingface_hub.constants import HF_HUB_CACHE

        config = timm.get_pretrained_cfg(name)
        source = config.hf_hub_id if config is not None and config.hf_hub_id else config and config.url
        raise BadInput(
            f"--weights: those of timm's {name} ({source}) are not in {HF_HUB_CACHE} and cannot be fetched "
            f"({one_line(error)}); wants a connection, or a file of weights"
        ) from None
    found: Mapping[str, Tensor] = made.state_dict()
    return found


def _read(path: Path) -> Mapping[str, Tensor]:
    """Read a file of parameters by name; nothing in it is run."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise BadInput(f"--weights: {path} is not there, wants a .safetensors or .pth file") from None
    except Exception as error:  # of whatever is no such file
        why, wants = one_line(error), "wants a .safetensors or .pth file"
        if why.startswith("Weights only load failed"):  # and how to run what is in it
            why, wants = (
                "it holds more, a whole module say",
                'wants these alone: torch.save(model.state_dict(), "w.pth")',
            )
        raise BadInput(f"--weights: {path} cannot be read as parameters ({why}); {wants}") from None
    for key in ("state_dict", "model"):  # as trainings of torchvision and others save them
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    ):
        raise BadInput(f"--weights: {path} holds {type(found).__name__}, wants parameters by name, a state_dict")
    return found


def _load(backbone: nn.Module, given: Mapping[str, Tensor], what: str, name: str) -> str | None:
    """Load weights; returns the name of the layer that gives the class scores if it has other classes, and stays new.

    A convolution of grey pictures takes what it would make of the same in red, green and blue. ``BadInput`` for weights
    of another backbone.
    """
    own = backbone.state_dict()
    state = dict(given)
    for key in own.keys() & state.keys():
        if own[key].ndim == 4 and own[key].shape[1] == 1 and state[key].shape[1:2] == (3,):
            state[key] = state[key].sum(1, keepdim=True)
    for missing in sorted(own.keys() ^ state.keys()):
        which = "does not have" if missing in own else "has, besides,"
        raise BadInput(f"{what} is not of {name}: it {which} {missing!r:.80}")
    other = [key for key in own if own[key].shape != state[key].shape]
    layers = {key.rpartition(".")[0] for key in other}
    if len(layers) > 1 and all(own[key].shape[1:] == state[key].shape[1:] for key in other):
        raise BadInput(
            f"{what}: {name} has {len(layers)} classifiers, {' and '.join(sorted(layers))}, of which it answers the "
            f"mean, and one alone can be new; wants weights of {len(own[other[0]])} classes, or another backbone"
        )
    if len(layers) > 1 or any(own[key].shape[1:] != state[key].shape[1:] for key in other):
        got, wants = (list(values[other[0]].shape) for values in (state, own))
        raise BadInput(f"{what} does not fit {name}: {other[0]!r} is {got}, wants {wants}")
    backbone.load_state_dict({**state, **{key: own[key] for key in other}})
    return layers.pop() if layers else None


def _usual(source: LabelledImages, crop: int, channels: int) -> Preprocessing:
    """Return torchvision's usual preprocessing; of images that fill their pictures nothing is cropped."""
    if source.fills:
        half = (0.5,) * channels
        return Preprocessing(crop, crop, half, half)
    mean, std = _in_channels(channels, IMAGENET_MEAN, IMAGENET_STD)
    return Preprocessing(crop, resize_for(crop), mean, std)


def _in_channels(channels: int, *values: tuple[float, ...]) -> list[tuple[float, ...]]:
    """Return values of each channel for another number of channels: of grey their mean, of RGB that of grey thrice."""
    return [value if len(value) == channels else (sum(value) / len(value),) * channels for value in values]


def _as_asked(asked: SimpleNamespace, usual: Preprocessing) -> Preprocessing:
    """Return a preprocessing with what options say."""
    if asked.squash and asked.resize is not None:
        raise BadInput("--squash: goes without --resize, wants one of them")
    crop = asked.crop or usual.crop
    resize = usual.resize
    if resize is not None and asked.crop is not None:
        resize = round(crop * resize / usual.crop)
    if asked.resize is not None or asked.squash:
        resize = asked.resize
    given = {name: value for name, value in (("mean", asked.mean), ("std", asked.std)) if value is not None}
    channels = asked.channels or next((len(value) for value in given.values()), usual.channels)
    for name, value in given.items():
        if len(value) != channels and channels in (1, 3):
            wants = "as --channels says" if asked.channels else "as the other one of --mean and --std has"
            raise BadInput(f"--{name}: got {len(value)} numbers, wants {channels}, {wants}")
    mean, std = _in_channels(channels, usual.mean, usual.std)
    try:
        return replace(usual, crop=crop, resize=resize, mean=asked.mean or mean, std=asked.std or std)
    except (ValueError, TypeError) as error:
        raise BadInput(f"--{error}") from None
