"""The files of a checkpoint: their names, and the older form, in which parameters had a name of their own."""

import json
from pathlib import Path

from auxhead.model import EarlyExitNetwork, ExitRule, FusedAuxHead
from support.example_models import SmallNet, plain_heads


def weights_of(folder: Path) -> Path:
    """The file of a checkpoint's parameters."""
    (path,) = folder.glob("model-*.safetensors")
    return path


def as_of_format_3(folder: Path) -> Path:
    """Give a checkpoint the older form, which has no hash, so that changed parameters are read; returns its folder.

    Pictures were squashed then.
    """
    weights_of(folder).rename(folder / "model.safetensors")
    path = folder / "model.json"
    content = {**json.loads(path.read_text()), "format": 3}
    del content["parameters"], content["own_exits"], content["learned_from"]
    prepared = content.pop("preprocessing") or {"crop": None, "mean": [0.5] * 3, "std": [0.5] * 3}
    content |= {"image_size": prepared["crop"], "mean": prepared["mean"], "std": prepared["std"]}
    path.write_text(json.dumps(content))
    return folder


def saved_network() -> EarlyExitNetwork:
    """Heads and rules of several kinds."""
    heads = {**plain_heads(), "block1": FusedAuxHead(24, 5, pool="max", pool_size=(2, 1), bias=False, dropout=0.25)}
    rules = {"block0": ExitRule(0.25, temperature=2.0), "block1": ExitRule(0.5, enabled=False), "block2": 0.1}
    return EarlyExitNetwork(SmallNet(), heads, rules)
