"""Split a batch over workers in whole samples."""

from collections.abc import Sequence
from fractions import Fraction

from labkit.errors import ConfigError


def largest_remainder(shares: Sequence[float | Fraction], total: int) -> list[int]:
    """Round fractional shares to integers that sum to `total`.

    Each worker first gets the floor of its share; what is left goes, one each, to the
    largest fractions. Ties go to the lower rank, so every worker computes the same split.

    Args:
        shares: Samples per worker, fractional, summing to `total`; shape (W,).
        total: Samples to hand out.

    Returns:
        Integers summing to `total`, each within 1 of its share; shape (W,).

    Raises:
        ConfigError: a share is negative, or the shares do not sum to `total`.

    References:
        Hamilton's method of apportionment; Balinski and Young, Fair Representation, 1982.
    """
    exact = [Fraction(share) for share in shares]
    for rank, share in enumerate(exact):
        if share < 0:
            raise ConfigError(f"shares[{rank}] must be at least 0, got {float(share)}. Use 0 for no samples.")
    if abs(float(sum(exact)) - total) > 1e-6 * max(1, total):
        raise ConfigError(f"shares must sum to {total}, got {float(sum(exact))}. Scale them.")
    floors = [int(share) for share in exact]
    order = sorted(range(len(exact)), key=lambda rank: (floors[rank] - exact[rank], rank))
    for rank in order[: total - sum(floors)]:
        floors[rank] += 1
    return floors


def split_batch(total: int, weights: Sequence[int]) -> list[int]:
    """Split `total` samples in proportion to whole weights, exactly (no floating point).

    Args:
        total: Samples to hand out; a partial last batch may be smaller than the sum of weights.
        weights: A worker's usual local batch; shape (W,), not all 0.

    Returns:
        Samples per worker, summing to `total`; equal to `weights` when they sum to it; shape (W,).

    Raises:
        ConfigError: all weights are 0.
    """
    whole = sum(weights)
    if whole <= 0:
        raise ConfigError(f"weights must have a sum above 0, got {list(weights)}. Give a worker samples.")
    return largest_remainder([Fraction(total * weight, whole) for weight in weights], total)
