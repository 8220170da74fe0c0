"""Do counts follow a distribution?"""

import numpy as np


def chi_square_and_limit(counts: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """The statistic of counts [n] against their expectations [n], rare ones (below 5) taken together, and its
    1 - 1e-6 quantile."""
    frequent = expected >= 5
    observed = np.append(counts[frequent], counts[~frequent].sum())
    expected = np.append(expected[frequent], expected[~frequent].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi_square = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    # Wilson and Hilferty's approximation of the quantile.
    limit = freedom * (1 - 2 / (9 * freedom) + 4.75 * np.sqrt(2 / (9 * freedom))) ** 3 if freedom else 0
    return float(chi_square), float(limit)
