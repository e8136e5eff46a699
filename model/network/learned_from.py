"""``LearnedFrom``: hashes of the samples that a network's weights, temperatures and thresholds were made from."""

import hashlib
import os
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..basics.bad_input import BadInput
from ..listening.batches import Batch, first_tensor, tensors_by_name
from ..listening.reading import are_tokens

#: What a network was given samples for; the index is the sample's *role*, and that of one it has not seen ``NEW``.
#: "weights" are the parameters, and the choice of their best epoch.
ROLES = ("weights", "temperature", "thresholds")
NEW = len(ROLES)

#: The kind of hashes that are of images' files; others name the dtype and sizes of an input.
FILE = "file"

#: Names of what a head's rule is in a state_dict: it is no parameter.
OF_RULE = re.compile(r"heads\.\d+\.rule\.")

#: Samples of fewer bytes than this are hashed one after the other: threads would take longer.
_WORTH_A_THREAD = 2**14


class Samples(NamedTuple):
    """Samples by hashes of their contents."""

    hashes: Sequence[Tensor]
    """One or more, [M] int64 each: two samples are the same if one of them is."""
    kinds: frozenset[str]
    """What the hashes are of: samples of other kinds may be the same images, prepared in another way."""


class RoleSamples(NamedTuple):
    """Samples that a network was given for one purpose, hashed in one way."""

    role: str
    kinds: frozenset[str]
    hashes: Tensor
    """[M] int64, each once, in ascending order."""


@dataclass(frozen=True)
class LearnedFrom:
    """What a network's weights, temperatures and thresholds were made from, as far as that is known."""

    unknown: str | None
    """What is not known, in words; None if all is."""
    parameters: tuple[str, ...] = ()
    """Hashes of the parameters that it is about; see :func:`fingerprint`."""
    parts: tuple[RoleSamples, ...] = ()

    def but(self, unknown: str) -> "LearnedFrom":
        """Return it with something more that is not known."""
        known = self.unknown is None or unknown in self.unknown
        return replace(self, unknown=self.unknown or unknown if known else f"{unknown}; and {self.unknown}")

    def plus(self, role: str, samples: Samples) -> "LearnedFrom":
        """Return it with more samples."""
        own = [part for part in self.parts if (part.role, part.kinds) == (role, samples.kinds)]
        hashes = torch.cat([*(part.hashes for part in own), *samples.hashes]).unique()
        others = tuple(part for part in self.parts if part not in own)
        return replace(self, parts=(*others, RoleSamples(role, samples.kinds, hashes)) if len(hashes) else others)

    def roles(self, samples: Samples) -> tuple[Tensor, str | None]:
        """Return the role of each sample, [M] int64, and why it is not known whether those that look new are; or None.

        Files and inputs are told apart where at least one is found again; inputs if all have one dtype and size, since
        padding makes others of them.
        """
        found, unknown = torch.full_like(samples.hashes[0], NEW), self.unknown
        for part in self.parts:
            same = torch.stack([torch.isin(each, part.hashes) for each in samples.hashes]).any(0)
            found[same] = found[same].clamp(max=ROLES.index(part.role))
            kinds = samples.kinds | part.kinds
            if unknown is None and len(kinds) > 1 and not (FILE in kinds and same.any()):
                unknown = (
                    f"its {part.role.removesuffix('s')}s were made from samples that were noted by "
                    f"{_in_words(part.kinds)}, and these, by {_in_words(samples.kinds)}, cannot be compared with them"
                )
        return found, unknown

    def facts(self) -> dict[str, Any]:
        """Return as JSON values all but the hashes of samples, which :meth:`tensors` has."""
        parts = [{"role": part.role, "kinds": sorted(part.kinds), "samples": len(part.hashes)} for part in self.parts]
        return {"unknown": self.unknown, "parameters": list(self.parameters), "parts": parts}

    def tensors(self) -> dict[str, Tensor]:
        """Return the hashes of samples, by a name for each part."""
        return {f"learned_from.{index}": part.hashes for index, part in enumerate(self.parts)}

    @staticmethod
    def of_facts(where: Path, facts: Mapping[str, Any] | None, tensors: dict[str, Tensor]) -> "LearnedFrom | None":
        """Return what :meth:`facts` and :meth:`tensors` are of, and take its tensors out of those of a checkpoint.

        Raises:
            BadInput: they are of nothing, or do not belong to each other.
        """
        if facts is None:
            return None
        try:
            parts = []
            for index, part in enumerate(facts["parts"]):
                hashes = tensors.pop(f"learned_from.{index}")
                if part["role"] not in ROLES or hashes.dtype != torch.int64 or hashes.shape != (part["samples"],):
                    raise ValueError(f"{hashes.dtype} {list(hashes.shape)} for {part}")
                parts.append(RoleSamples(part["role"], frozenset(map(str, part["kinds"])), hashes))
            unknown = None if facts["unknown"] is None else f"{facts['unknown']}"
            return LearnedFrom(unknown, tuple(map(str, facts["parameters"])), tuple(parts))
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"checkpoint: {where} has a damaged learned_from ({error!r:.100})") from None


def learned_by(network: Any) -> LearnedFrom:
    """Return what an :class:`EarlyExitNetwork` has learned from, and its parameters of now.

    What nobody has noted, and parameters that have changed since, are not known.
    """
    now, noted = fingerprint(network), network.learned_from
    if noted is None:
        return LearnedFrom("nothing was noted where its parameters come from", now)
    if any(one == other for one, other in zip(now, noted.parameters, strict=False)):
        return noted
    changed = "its parameters have changed since that was noted, by a training of your own, say"
    return replace(noted, parameters=now).but(changed)


def fingerprint(network: nn.Module, but: Container[str] = ()) -> tuple[str, ...]:
    """Return hashes of a network's parameters and buffers in two dtypes: a cast to one of these leaves its hash.

    Those of the names ``but`` are left out.
    """
    found = {dtype: hashlib.blake2b(digest_size=8) for dtype in (torch.bfloat16, torch.float16)}
    for name, value in network.state_dict().items():
        if not isinstance(value, Tensor) or OF_RULE.match(name) or is_lazy(value) or value.is_meta or name in but:
            continue
        if value.layout is not torch.strided:  # a graph's edges, say
            continue
        for dtype, own in found.items():
            cast = value.detach().to(dtype) if value.is_floating_point() else value.detach()
            content: Any = cast.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            own.update(content)
    return tuple(own.hexdigest() for own in found.values())


def identities(x: Batch, mask: tuple[str, Tensor] | None = None) -> list[bytes]:
    """Return of each sample of a batch a hash of its content, 16 bytes.

    Padding that the mask [N, T] tells, given with its name, is no content; what is not of samples is one of all.
    """
    if isinstance(x, Tensor):
        return _of_rows(x)
    samples, kept = len(first_tensor(x)), None if mask is None else are_tokens(mask[0], mask[1].detach().cpu())
    parts, digests = tensors_by_name(x), []
    for each in parts.values():
        if not each.ndim or len(each) != samples:
            digests.append(_of_rows(each[None]) * samples)
        elif kept is None or each.shape[:2] != kept.shape:
            digests.append(_of_rows(each))
        else:
            rows = zip(each.detach().cpu(), kept, strict=True)
            digests.append([_of_rows(sample[own][None])[0] for sample, own in rows])
    names = "\0".join(parts).encode()
    return [_digest(b"".join([names, *own])) for own in zip(*digests, strict=True)]


def _of_rows(x: Tensor) -> list[bytes]:
    rows = x.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(len(x), -1).view(torch.uint8).numpy()
    if rows[:1].nbytes < _WORTH_A_THREAD:
        return [_digest(row) for row in rows]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(_digest, rows))


def short(digests: Iterable[bytes]) -> Tensor:
    """Return digests by their first 8 bytes, [M] int64."""
    return torch.from_numpy(np.frombuffer(b"".join(one[:8] for one in digests), "<i8").astype(np.int64))


def kind_of_input(x: Batch, mask: tuple[str, Tensor] | None = None) -> str:
    """Return the kind of a batch's samples; the number of tokens, if a mask tells padding, is T."""
    kinds = []
    for name, each in tensors_by_name(x).items():
        sizes = [*map(str, each.shape[1:])]
        if mask is not None and each.shape[:2] == mask[1].shape:
            sizes[0] = "T"
        kinds.append(f"{name} {each.dtype} [{', '.join(sizes)}]".replace("torch.", "").strip())
    return ", ".join(kinds)


def _digest(content: Any) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def hashes_of(contents: Iterable[bytes]) -> Tensor:
    """Return of each content a hash, [M] int64."""
    return short(map(_digest, contents))


def _in_words(kinds: frozenset[str]) -> str:
    named = sorted("their files" if kind == FILE else f"their values as {kind}" for kind in kinds)
    return " and ".join(named[:2]) + (" and others" if len(named) > 2 else "")
