"""When requests of an open loop arrive: gaps from a gamma distribution, as `vllm bench serve` draws them.

With rate r and burstiness b a gap has shape b and scale 1 / (r b), so its mean is 1 / r whatever b is, and its
coefficient of variation 1 / sqrt(b): b = 1 is a Poisson process, b below 1 comes in bursts, b above 1 is steadier. The
times are then stretched so that the last of n requests arrives at n / r, which keeps the rate of a short run as asked.
"""

from __future__ import annotations

import numpy as np

from paceline.errors import ConfigError


def arrival_times(num_requests: int, rate: float, *, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds from the beginning to each arrival, ascending.

    Args:
        num_requests: how many.
        rate: requests per second.
        burstiness: shape of the gamma distribution.
        seed: equal seeds give equal times, so that every set-up meets the same load.

    Raises:
        ConfigError: a number that is not positive.
    """
    if not (rate > 0 and burstiness > 0 and np.isfinite(rate) and np.isfinite(burstiness)):
        raise ConfigError(f"request rate {rate} and burstiness {burstiness} have to be positive numbers")
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), num_requests)
    times = np.cumsum(gaps)
    if num_requests and times[-1] > 0:
        times *= num_requests / rate / times[-1]
    return [float(time) for time in times]
