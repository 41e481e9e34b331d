"""Books for tests: of any size at once, since nothing is refined."""

import numpy as np
from kvcodecs.fibquant.book import Book
from kvcodecs.fibquant.lloyd import LloydReport
from kvcodecs.fibquant.profile import Profile


def random_book(d, k, n, rotation="hadamard", seed=0):
    """Return a book of random rotation and codewords, about where unit vectors have theirs."""
    rng = np.random.default_rng([seed, d, k, n])
    if rotation == "haar":
        data = np.linalg.qr(rng.standard_normal((d, d)))[0]
    else:
        data = rng.choice([-1.0, 1.0], (2, d))
    codewords = rng.standard_normal((n, k)) / np.sqrt(d)
    profile = Profile.paper_default(d, k, n, seed, rotation=rotation)
    report = LloydReport("lloyd_report_v1", 4, 25, 256, 1.0, 1.0, 0, 0, (), profile.codebook_seed)
    return Book(profile, data.astype(np.float32), codewords.astype(np.float32), report)
