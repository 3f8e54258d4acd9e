"""Sequences of FLUID: the paper's counts, what is drawn from which pool, and files."""

import numpy as np
import pytest

from nevis_lite.config import UserError
from nevis_lite.fluid_sequence import Sequence, build_sequence, class_counts, reserve


def pool(sizes, seed=0):
    """Labels of a pool with so many images of each class, in a random order."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))


def test_counts_of_the_paper():
    counts = class_counts(1000)
    assert counts.tolist() == [25000 // (rank + 25) for rank in range(1, 1001)]  # whole numbers only, no rounding
    assert (counts.sum(), counts.max(), counts.min(), (counts > 50).sum()) == (91_858, 961, 24, 465)


@pytest.mark.parametrize("classes, c, largest, smallest", [(100, 25, 714, 24), (200, 12, 400, 11), (2, 25, 47, 24)])
def test_the_law_has_no_scale(classes, c, largest, smallest):
    counts = class_counts(classes, c)  # 25 * 100 / 3.5, 12 * 200 / 6, 25 * 2 / 1.05, and c / 1.025
    assert (counts[0], counts[-1]) == (largest, smallest)
    assert (np.diff(counts) <= 0).all() and counts.dtype == np.int64


def test_a_sequence_of_the_papers_size():
    labels = pool(np.full(1250, 1000))
    sequence = build_sequence(labels, range(500), n_classes=1000)
    assert sorted(sequence.count, reverse=True) == class_counts(1000).tolist()
    assert sequence.head.sum() == 465 and sequence.threshold == 50
    assert sequence.known == 250 and sequence.new.sum() == 750
    assert len(set(sequence.index)) == len(sequence.index) == 91_858
    assert (labels[sequence.index] == sequence.classes[sequence.label]).all()


def test_a_quarter_was_pretrained_and_the_rest_was_not():
    sequence = build_sequence(pool(np.full(60, 100)), range(0, 60, 2), n_classes=40, c=2)
    assert sequence.known == 10
    assert (sequence.classes[:10] % 2 == 0).all() and (sequence.classes[10:] % 2 == 1).all()
    assert len(set(sequence.classes)) == 40


def test_the_order_is_random():
    """A class is as frequent in the first half as in the second, and its samples do not come in a row."""
    sequence = build_sequence(pool(np.full(20, 1000)), range(5), n_classes=20)
    half = np.bincount(sequence.label[:len(sequence.label) // 2], minlength=20)
    assert np.corrcoef(half, sequence.count)[0, 1] > 0.98
    same, chance = np.mean(np.diff(sequence.label) == 0), np.sum((sequence.count / sequence.count.sum()) ** 2)
    assert abs(same - chance) < 0.02


def test_counts_are_cut_only_where_no_class_has_enough():
    """One class has more than all targets (47 and 24), the other 30: the rich one must get 47, though counts are random."""
    for seed in range(5):
        sequence = build_sequence(pool([100, 30]), [0], n_classes=2, frac_pretrain=0.5, seed=seed)
        assert sequence.count.tolist() == [47, 24]
    poor = build_sequence(pool([40, 30]), [0], n_classes=2, frac_pretrain=0.5)
    assert poor.count.tolist() == [40, 24]


def test_natural_counts_and_every_class_at_least_once():
    sizes = [5, 1, 0, 70, 2]
    sequence = build_sequence(pool(sizes), [3], n_classes=4, natural=True)
    assert sequence.known == 1 and sequence.classes.tolist() == [3, 0, 1, 4]  # class 2 has no image
    assert sequence.count.tolist() == [70, 5, 1, 2] and sequence.head.tolist() == [True, False, False, False]
    rare = build_sequence(pool(np.full(40, 10)), range(10), n_classes=40, c=0.2)
    assert class_counts(40, 0.2).min() == 0 and rare.count.min() == 1


@pytest.mark.parametrize("share, known", [(0.0, 0), (0.25, 1), (1.0, 2)])
def test_two_classes(share, known):
    sequence = build_sequence(pool(np.full(4, 60)), [1, 2], n_classes=2, frac_pretrain=share)
    assert sequence.known == known and sorted(sequence.count) == [24, 47]
    assert sequence.new.sum() == 2 - known
    assert all(sequence.new[np.flatnonzero(sequence.label == slot)[0]] for slot in range(known, 2))


def test_no_image_is_in_two_sequences_or_pretrained():
    labels = pool(np.full(30, 80))
    pretrained = reserve(labels, range(10))
    first = build_sequence(labels, range(10), n_classes=12, c=2, exclude_images=pretrained)
    second = build_sequence(labels, range(10), n_classes=12, c=2, exclude_images=[*pretrained, *first.index],
                            exclude_classes=first.classes)
    parts = [set(pretrained), set(first.index), set(second.index)]
    assert len(set.union(*parts)) == sum(map(len, parts))
    assert not set(first.classes[3:]) & set(second.classes[3:])
    assert np.bincount(labels[pretrained]).tolist() == [40] * 10


def test_reserve_leaves_an_image_for_the_stream():
    labels = pool([1, 2, 3, 10, 0])
    assert np.bincount(labels[reserve(labels, range(5), 0.9)], minlength=5).tolist() == [0, 1, 2, 9, 0]
    assert np.bincount(labels[reserve(labels, [1, 3], 0.01)], minlength=5).tolist() == [0, 1, 0, 1, 0]
    assert (reserve(labels, range(5), seed=1) != reserve(labels, range(5))).any()


def test_a_pool_that_is_too_small():
    with pytest.raises(UserError, match="3 novel classes with 24 or more images left, and a sequence of 8 classes needs 6"):
        build_sequence(pool([30] * 6), range(3), n_classes=8)
    with pytest.raises(UserError, match="0 pretrained classes"):
        build_sequence(pool([30] * 6), [], n_classes=4)
    with pytest.raises(UserError, match="0 novel classes"):
        build_sequence(pool([30] * 6), [0, 1], n_classes=4, exclude_classes=range(6))


def test_same_seed_same_sequence_and_the_hash_tells():
    labels, build = pool(np.full(12, 60)), build_sequence
    one, again, other = (build(labels, range(4), n_classes=8, c=2, seed=seed) for seed in (3, 3, 4))
    assert one.hash == again.hash != other.hash
    assert len(one.hash) == 12 and set(one.hash) <= set("0123456789abcdef")
    for change in ({"threshold": 9.0}, {"names": ["x"] * 8}, {"known": 3}, {"index": one.index[::-1]}):
        assert Sequence(**{**vars(one), **change}).hash != one.hash


def test_the_hash_stays_what_it_is():
    """Of a sequence written down by hand, so that stored results keep meaning the same sequence."""
    sequence = Sequence(np.array([2, 0, 1]), np.array([1, 0, 1]), np.array([5, 7]), ["a", "b"], 1, 2.0, 0)
    assert sequence.hash == "2ede4eb4a745"


def test_a_stored_sequence_comes_back(tmp_path):
    names = [f"Klasse {number} – é" for number in range(12)]
    sequence = build_sequence(pool(np.full(12, 60)), range(4), n_classes=8, c=2, names=names)
    sequence.save(tmp_path / "sequence.npz")
    back = Sequence.load(tmp_path / "sequence.npz")
    assert back.hash == sequence.hash and back.names == [names[one] for one in sequence.classes]
    with np.load(tmp_path / "sequence.npz", allow_pickle=False) as file:
        assert file["label"].dtype == np.int64 and file["names"].tolist() == sequence.names
    (tmp_path / "text.npz").write_text("no sequence")
    np.savez(tmp_path / "other.npz", pred=np.zeros(3))
    for name, message in (("text", "cannot be read"), ("absent", "cannot be read"), ("other", "lacks index")):
        with pytest.raises(UserError, match=message):
            Sequence.load(tmp_path / f"{name}.npz")
