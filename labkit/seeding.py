"""Named, independent seed streams derived from the one seed of an experiment."""

import hashlib


def stream_seed(seed: int, *names: str | int) -> int:
    """Derive the seed of a named random stream, the same on every machine and Python version.

    Args:
        seed: The experiment's seed.
        names: What the stream is for, for example `("sampler", epoch)` or `("worker", rank)`.

    Returns:
        An integer in [0, 2**63), fit for `torch.Generator.manual_seed` and numpy's generators.
    """
    key = "\x1f".join([str(seed), *(str(name) for name in names)])
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
