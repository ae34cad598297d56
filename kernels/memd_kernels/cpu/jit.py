"""How CPU kernels are compiled and divided among threads.

numba compiles them when this package is imported for the first time, and keeps the machine code
beside the source or in the user's cache. They run on the threads of torch's own OpenMP runtime.
"""

import functools
from collections.abc import Callable
from typing import Any

import numba
import torch

MAX_ROWS = 16  # of a decode step; with more, the matrix products of torch win
# Sums may be reordered, so that they fit vector registers; NaN and infinity keep their meaning.
_FASTMATH = {"contract", "reassoc", "nsz"}

_MOST_THREADS = int(numba.get_num_threads())
# A part of kernels, compiled with the first that calls it.
part: Callable[..., Any] = numba.njit(fastmath=_FASTMATH, error_model="numpy", cache=True)


def kernel(signature: str, parallel: bool = False) -> Callable[..., Any]:
    """Compile a function for one signature, now or from the cache."""
    compiled: Callable[..., Any] = numba.njit(
        signature, parallel=parallel, fastmath=_FASTMATH, error_model="numpy", cache=True
    )
    return compiled


def threads() -> int:
    """As many threads as torch uses; kernels divide their work by this number."""
    count = min(torch.get_num_threads(), _MOST_THREADS)
    _limit(count)
    return count


@functools.lru_cache(maxsize=1)
def _limit(count: int) -> None:
    numba.set_num_threads(count)
