"""Early exit for text: a transformer with heads on masked means, trained, calibrated, and run from graphs by length.

Run it with ``python -m auxhead.model.examples.classify_text``. The paragraphs are those of the docstrings of three
libraries that are installed here, and the question is in which of these one stands. A model of HuggingFace goes the
same way: its tokenizer's output, with ``labels`` in it, is a batch.
"""

import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pkgutil import resolve_name

import torch
from auxhead.model import TrainingPlan, attach, calibrate_network, load_checkpoint, make_runner, save_checkpoint, train
from torch import Tensor, nn
from torch.utils.data import DataLoader

LIBRARIES = {
    "torch": ("", ".nn", ".nn.functional", ".optim", ".distributions"),
    "sklearn": (".linear_model", ".tree", ".cluster", ".metrics", ".ensemble", ".svm"),
    "matplotlib": (".axes", ".figure", ".colors", ".patches", ".ticker", ".text", ".lines", ".axis", ".artist"),
}
EACH, WORDS, EPOCHS = 700, 2_000, 5
#: Of a paragraph; and the lengths that graphs are made for, to the next of which a batch is padded.
LONGEST, LENGTHS = 64, (24, 40, 64)


def read_sentences(library: str) -> list[list[str]]:
    """Return paragraphs of a library's docstrings as words, each once, in an order that is always the same."""
    found: dict[str, list[str]] = {}
    for part in LIBRARIES[library]:
        for each in vars(resolve_name(library + part)).values():
            text = vars(each).get("__doc__") if isinstance(each, type) else getattr(each, "__doc__", None)
            for paragraph in re.split(r"\n\s*\n", text if isinstance(text, str) else ""):
                words = re.findall(r"[a-z]+", paragraph.lower())
                if 10 <= len(words) <= LONGEST and library not in words:
                    found[" ".join(words)] = words
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))[:EACH]
    return [found[sorted(found)[index]] for index in order.tolist()]


class Encoder(nn.Module):
    """Four layers of a transformer on words, and a classifier of the mean over those that are no padding."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS + 2, width, padding_idx=0), nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.3, batch_first=True)
        # nested tensors, which it would make of padded ones in eval mode, are no input for heads
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.classifier = nn.Linear(width, len(LIBRARIES))

    def forward(self, ids: Tensor, padding_mask: Tensor) -> Tensor:
        """Return logits [N, 3] of ids [N, T] int64 and a mask [N, T] bool that is true at padding."""
        y = self.words(ids) + self.places.weight[: ids.shape[1]]
        y = self.encoder(y, src_key_padding_mask=padding_mask)
        kept = ~padding_mask[..., None]
        return self.classifier((y * kept).sum(1) / kept.sum(1))


def collate(samples: Sequence[tuple[list[int], int]]) -> dict[str, Tensor]:
    """Make a batch: ids padded with 0 to the longest of these paragraphs, the mask that says so, and labels [N]."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids, _ in samples], batch_first=True)
    return {"ids": ids, "padding_mask": ids == 0, "labels": torch.tensor([label for _, label in samples])}


def load_splits() -> list[DataLoader[tuple[list[int], int]]]:
    """Return batches for training, calibration and the test, with the commonest words of the training as numbers."""
    texts = [(words, label) for label, library in enumerate(LIBRARIES) for words in read_sentences(library)]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(1)).tolist()
    learned, rest = order[: len(texts) * 6 // 10], order[len(texts) * 6 // 10 :]
    counts = Counter(word for index in learned for word in texts[index][0])
    number = {word: place + 2 for place, (word, _) in enumerate(counts.most_common(WORDS))}  # 1 is any other word
    samples = [([number.get(word, 1) for word in words], label) for words, label in texts]
    splits = (learned, rest[: len(rest) // 2], rest[len(rest) // 2 :])
    return [
        DataLoader([samples[index] for index in split], 50, shuffle=split is learned, collate_fn=collate)  # type: ignore[arg-type]
        for split in splits
    ]


def main(device: str) -> None:
    """Go all the way, in a folder that is gone afterwards."""
    torch.manual_seed(0)
    training, held_out, test = load_splits()
    first = {name: each.to(device) for name, each in next(iter(held_out)).items() if name != "labels"}
    network = attach(Encoder().to(device), example_input=first)  # reads tokens by the mask, which it finds by its name
    print(network.describe())
    plan = TrainingPlan("joint", epochs=EPOCHS, learning_rate=3e-3)
    train(network, training, plan, on_epoch=lambda epoch: print(f"epoch {epoch.epoch + 1}: loss {epoch.loss:.2f} nats"))
    report = calibrate_network(network, held_out, max_accuracy_drop=0.03, confidence=0.9)
    print(f"calibrated: {report.accuracy:.1%} right, {report.full_accuracy:.1%} if nobody left early")
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(folder, network, classes=[*LIBRARIES], calibration=report.to_json())
        network = load_checkpoint(folder, Encoder().to(device)).network

    right, left = 0, torch.zeros(len(network.taps) + 1, dtype=torch.int64)
    with make_runner(network, first, lengths=LENGTHS) as runner:  # on a GPU graphs of each length
        print(runner.describe())
        for batch in test:
            labels = batch.pop("labels")
            answer = runner(batch)
            right += int((answer.label.cpu() == labels).sum())
            left += torch.bincount(answer.exit_index.cpu(), minlength=len(left))
    print(f"test: {int(left.sum())} paragraphs, {right / int(left.sum()):.1%} right")
    for index, name in enumerate([*network.taps, "classifier"]):
        print(f"  {int(left[index]):>4} paragraphs left at exit {index}, {name}")


if __name__ == "__main__":
    main("cuda" if torch.cuda.is_available() else "cpu")
