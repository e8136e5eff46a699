"""Two processes that train together: equal on both, and what one process makes of the same batches."""

import pytest
import torch
import torch.multiprocessing
from auxhead.model.network.learned_from import identities, short
from support.replica_cases import saved_by_ranks
from support.spawned_training import PLAN, RANKS, train_together, trained
from support.trainable import assert_equal_bits, digits, images, tensors, trainable

pytestmark = pytest.mark.usefixtures("without_interpreter")


@pytest.fixture(scope="module")
def found(tmp_path_factory, without_interpreter):
    """What each process found."""
    return saved_by_ranks(train_together, tmp_path_factory.mktemp("ranks"), RANKS)


def test_all_processes_have_the_same_network(found):
    """Buffers of batch norms, of which each has seen other images, too; they began with other parameters."""
    for kind in ("plain", "norm", "resumed", "sampler"):
        assert_equal_bits(found[0][kind][0], found[1][kind][0])
        assert found[0][kind][1] == found[1][kind][1]
    assert_equal_bits(found[0]["norm"][0], found[0]["resumed"][0])
    assert found[0]["norm"][1] == found[0]["resumed"][1], "a resumed training is the uninterrupted one"


def test_two_processes_train_as_one_does_on_the_same_batches(found):
    wanted, done = trained(norm=False)
    fresh = tensors(trainable(norm=False))
    together, epochs = found[0]["plain"]
    for name, value in wanted.items():
        assert not torch.equal(value, fresh[name])
        torch.testing.assert_close(together[name], value, rtol=1e-3, atol=1e-4)
    assert epochs.best == done.best and len(epochs.epochs) == PLAN.epochs
    for one, other in zip(epochs.epochs, done.epochs, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
        assert one.accuracy == pytest.approx(other.accuracy, abs=1 / 60 + 1e-9)


def test_steps_count_the_images_of_all_processes_and_each_knows_what_all_have_learned_from(found):
    wanted = short(identities(images(digits()[0], 64).tensors[0])).unique()
    assert found[0]["sampler"][1] == [16] * 8
    assert all(torch.equal(each["sampler"][2], wanted) for each in found)
