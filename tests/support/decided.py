"""Grey pictures, a network that leaves at every exit for them, and what files of its decision answer."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from auxhead.model import EarlyExitNetwork, ExitRule, Preprocessing
from PIL import Image
from support.digits_network import untrained
from support.documents import ROOT, snippets
from torch import Tensor

#: Where the script begins that the page shows.
SCRIPT = "# answer.py, where it is deployed\n"


def grey_pictures(count: int) -> list[Image.Image]:
    """Return pictures of 8 x 8 pixels, of more and less contrast."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (count, 8, 8)) * generator.uniform(0.1, 1.0, (count, 1, 1))
    return [Image.fromarray(each) for each in pixels.astype(np.uint8)]


def grey_network(*criteria: str) -> tuple[EarlyExitNetwork, Preprocessing]:
    """Return a network for such pictures, whose two heads have a rule each, and how it reads them."""
    torch.manual_seed(0)
    network = untrained().eval()
    network.set_rules(dict(zip(network.taps, (ExitRule(criterion=each) for each in criteria), strict=True)))
    network.preprocessing = Preprocessing(crop=8, resize=None, mean=(0.4,), std=(0.1,))
    return network, network.preprocessing


@torch.no_grad()
def leave_everywhere(network: EarlyExitNetwork, x: Tensor) -> None:
    """Set thresholds so that a third of the samples, about, is sure at each head; a label of patience stays once."""
    for head, logits in zip(network.exit_heads, network.logits(x), strict=False):
        confidence = head.rule.judge(logits, return_probs=False).confidence
        by_patience = head.rule.criterion == "patience"
        head.rule.threshold = 1.0 if by_patience else float(confidence.float().quantile(0.67))


def page_script() -> str:
    """Return the script of docs/export.md that answers for a picture without auxhead."""
    (found,) = (snippet.code for snippet in snippets(ROOT / "docs" / "export.md") if SCRIPT in snippet.code)
    return found[found.index(SCRIPT) :]


Runs = Callable[..., Sequence[Tensor]]


def opened(path: Path) -> Runs:
    """Return what runs a file on a sample, under rules by name: as its reader would, with no code of ours."""
    if path.suffix == ".onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(path, options)

        def run_session(x: Tensor, **rules: Tensor) -> list[Tensor]:
            given = {"input": x.numpy(), **{name: value.numpy() for name, value in rules.items()}}
            return [torch.from_numpy(each) for each in session.run(None, given)]

        return run_session
    module = torch.export.load(path).module()

    def run(x: Tensor, **rules: Tensor) -> Sequence[Tensor]:
        for name, value in rules.items():
            module.get_buffer(name).copy_(value)
        with torch.no_grad():
            return module(x)

    return run


def assert_answers(run: Runs, network: EarlyExitNetwork, samples: Tensor, **rules: Tensor) -> set[int]:
    """Assert that a file answers as the network, for five samples of each exit; return the exits."""
    wanted = [part for part in network(samples) if part is not None]
    exits = wanted[-1].unique().tolist()
    for index in torch.cat([(wanted[-1] == each).nonzero()[:5, 0] for each in exits]).tolist():
        found = run(samples[index : index + 1], **rules)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other[index : index + 1], rtol=1e-4, atol=1e-5)
    return {*exits}
