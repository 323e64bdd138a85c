"""Random numbers equal recorded values and a slow version with Python integers, and are uniform and independent."""

import numpy as np
import pytest

from pipelinerl import rng

MASK = 2**64 - 1


def splitmix64(state):
    """Return splitmix64's output function of a state, after Steele, Lea and Flood (2014), with Python integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


def test_random_numbers_equal_the_recorded_values():
    """If a number changed, the problems and the sampling noise of every recorded run would change."""
    assert rng.key(0) == 4246866556266386882
    assert rng.key(0, "a", 1) == 4403504271606596215
    assert rng.key(1, "mixture", 7) == 1593644139804255192
    assert rng.generator(3, "x").integers(0, 1000, 5).tolist() == [877, 378, 501, 78, 494]
    assert rng.sample_keys(42, 3).tolist() == [13679457532755275413, 2949826092126892291, 5139283748462763858]


def test_sampling_noise_equals_splitmix64_of_the_key_and_the_token_position():
    gamma = 0x9E3779B97F4A7C15
    keys = [splitmix64((42 + gamma * (i + 1)) & MASK) for i in range(3)]
    assert rng.sample_keys(42, 3).tolist() == keys
    drawn = rng.uniform(rng.sample_keys(42, 3), np.array([0, 1, 2])).tolist()
    assert drawn == [(splitmix64((k + gamma * (t + 1)) & MASK) >> 11) / 2**53 for t, k in enumerate(keys)]


def test_rng_keys_of_different_paths_differ_even_if_their_elements_join_to_the_same_text():
    paths = [(1,), ("1",), (1, 2), (12,), ("1", "2"), ("12",), (), ("",), ("a", "b"), ("ab",)]
    assert len({rng.key(0, *path) for path in paths}) == len(paths)
    assert all(0 <= rng.key(seed, "x") < 2**63 for seed in range(1000))


def test_sampling_noise_of_a_token_does_not_depend_on_its_batch():
    keys, positions = rng.sample_keys(7, 64), np.arange(64)
    alone = [float(rng.uniform(keys[i : i + 1], positions[i : i + 1])[0]) for i in range(64)]
    assert rng.uniform(keys, positions).tolist() == alone


@pytest.mark.parametrize("along", ["samples", "positions", "seeds"])
def test_sampling_noise_is_uniform_and_uncorrelated(along):
    """A χ² test over 64 cells, and the correlation of neighbouring numbers, are within 5 standard deviations."""
    n = 65536
    if along == "samples":
        drawn = rng.uniform(rng.sample_keys(1, n), np.zeros(n, np.int64))
    elif along == "positions":
        drawn = rng.uniform(np.repeat(rng.sample_keys(1, 1), n), np.arange(n))
    else:
        drawn = rng.uniform(np.concatenate([rng.sample_keys(seed, 1) for seed in range(n)]), np.zeros(n, np.int64))
    assert drawn.min() >= 0.0 and drawn.max() < 1.0
    counts = np.bincount((drawn * 64).astype(int), minlength=64)
    chi_squared = ((counts - n / 64) ** 2 / (n / 64)).sum()
    assert abs(chi_squared - 63) < 5 * np.sqrt(2 * 63)
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 5 / np.sqrt(n)


def test_consecutive_seeds_share_no_sampling_noise():
    """In particular, the key of sample i of seed s must differ from the key of sample i − 1 of seed s + 1."""
    keys = np.concatenate([rng.sample_keys(seed, 16) for seed in range(1000)])
    assert np.unique(keys).shape == keys.shape
