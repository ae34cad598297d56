"""How CPU kernels are compiled and divided among threads.

numba compiles them when this package is imported for the first time, and keeps the machine code
beside the source. They run on the threads of torch's own OpenMP runtime.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import torch
from torch import Tensor

MAX_ROWS = 16  # of a decode step; with more, the matrix products of torch win
# Sums may be reordered, so that they fit vector registers; NaN and infinity keep their meaning.
_FASTMATH = {"contract", "reassoc", "nsz"}

_numba: Any = numba.config


def _cache_path() -> Path:
    """Where machine code goes: by all sources, as numba alone misses changes of what is inlined."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    return Path(_numba.CACHE_DIR or Path(__file__).parent / "__pycache__") / digest[:16]


_numba.CACHE_DIR = str(
    _cache_path()
)  # if nothing can be written there numba takes the user's cache

# As numba starts it sets the threads of the OpenMP runtime that it shares with torch.
_torch_threads = torch.get_num_threads()
_MOST_THREADS = int(numba.get_num_threads())
torch.set_num_threads(_torch_threads)
# A part of kernels, compiled with the first that calls it.
part: Callable[..., Any] = numba.njit(fastmath=_FASTMATH, error_model="numpy", cache=True)


def kernel(signatures: str | list[str], parallel: bool = False) -> Callable[..., Any]:
    """Compile a function for one signature or several, now or from the cache."""
    compiled: Callable[..., Any] = numba.njit(
        signatures, parallel=parallel, fastmath=_FASTMATH, error_model="numpy", cache=True
    )
    return compiled


def threads() -> int:
    """As many threads as torch uses; kernels divide their work by this number."""
    count = min(torch.get_num_threads(), _MOST_THREADS)
    _limit(count)
    return count


def parts_for(rows: Tensor) -> int:
    """How many threads share rows that are quickly computed: waking others takes longer for few."""
    return threads() if rows.shape[0] > MAX_ROWS else 1


@functools.lru_cache(maxsize=1)
def _limit(count: int) -> None:
    numba.set_num_threads(count)
