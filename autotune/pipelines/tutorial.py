"""The networks of PyTorch's model-parallel tutorial: a ResNet on two devices, and the same with micro-batches."""

import copy

import torch
from torch import Tensor, nn


class ModelParallelResNet(nn.Module):
    """Tutorial's ``ModelParallelResNet50``: layers up to ``cut`` on one device, the others on another."""

    def __init__(self, backbone: nn.Module, cut: str, first: torch.device, second: torch.device) -> None:
        """Split copies of the layers of one of torchvision's ResNets."""
        super().__init__()
        children = [(name, child) for name, child in backbone.named_children() if name != "fc"]
        end = [name for name, _ in children].index(cut) + 1
        self.second = second
        self.seq1 = nn.Sequential(*(copy.deepcopy(child) for _, child in children[:end])).to(first)
        self.seq2 = nn.Sequential(*(copy.deepcopy(child) for _, child in children[end:])).to(second)
        self.fc = copy.deepcopy(backbone.get_submodule("fc")).to(second)

    @torch.inference_mode()
    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, on the second device."""
        x = self.seq2(self.seq1(x).to(self.second))
        return self.fc(x.view(x.size(0), -1))


class PipelineParallelResNet(ModelParallelResNet):
    """Tutorial's ``PipelineParallelResNet50``: micro-batches, so that both devices work at a time."""

    def __init__(
        self, backbone: nn.Module, cut: str, first: torch.device, second: torch.device, split_size: int
    ) -> None:
        """Split layers as the other does, and batches into ``split_size`` samples."""
        super().__init__(backbone, cut, first, second)
        self.split_size = split_size

    @torch.inference_mode()
    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, on the second device."""
        splits = iter(x.split(self.split_size, dim=0))
        s_next = next(splits)
        s_prev = self.seq1(s_next).to(self.second)
        ret = []

        for s_next in splits:
            # A. ``s_prev`` runs on the second device
            s_prev = self.seq2(s_prev)
            ret.append(self.fc(s_prev.view(s_prev.size(0), -1)))

            # B. ``s_next`` runs on the first device, which can run concurrently with A
            s_prev = self.seq1(s_next).to(self.second)

        s_prev = self.seq2(s_prev)
        ret.append(self.fc(s_prev.view(s_prev.size(0), -1)))
        return torch.cat(ret)
