"""Where in a row the draw of `sample` has to look: windows of keys, from a histogram of the keys.

Three keys decide: the one at which top-k ends, the one at which top-p does, the one that is drawn.
A window is a range of keys about where one must be; the tokens in the windows are gathered, and
below each window only sums are taken. Where a histogram puts the three is an estimate: exact sums
tell whether a window has its key, and one that has not is moved by what it missed it by.
"""

import triton
import triton.language as tl

from memd_kernels.triton.sample_draw import LEAST, ONE, draw_target

BINS = tl.constexpr(128)  # of keys: 16 an octave of distances, from 2**-3 to 2**5
_SHIFT = tl.constexpr(19)
_FIRST_BIN = tl.constexpr((127 - 3) << 4)
_FARTHEST = tl.constexpr(32.0)  # tokens at this distance have no weight


@triton.jit
def key_bins(keys):
    """Bins of keys, int32."""
    return tl.minimum(tl.maximum((keys >> _SHIFT) - _FIRST_BIN, 0), BINS - 1)


@triton.jit
def _at(values, index):
    """Element of a vector; 0 before its first."""
    place = tl.arange(0, BINS)
    return tl.sum(tl.where(place == index, values, tl.zeros_like(values)), 0)


@triton.jit
def _bin_edges(bins):
    """Least and greatest distances in bins."""
    low = ((bins + _FIRST_BIN) << _SHIFT).to(tl.float32, bitcast=True)
    high = ((bins + _FIRST_BIN + 1) << _SHIFT).to(tl.float32, bitcast=True)
    return tl.where(bins == 0, 0.0, low), high


@triton.jit
def _bin_masses(counts, total):
    """Estimated masses of bins, float32, and bounds of them, in units of the likeliest token's.

    Within a bin, tokens are taken to be spread evenly. What is then missing in the total is shared
    out by the variances of the bins' masses.
    """
    bins = tl.arange(0, BINS)
    low, high = _bin_edges(bins)
    most = tl.where(bins == BINS - 1, 0.0, tl.exp(-low))
    least = tl.where(bins == BINS - 1, 0.0, tl.exp(-high))
    tokens = counts.to(tl.float32)
    masses = tokens * (most - least) / (high - low)
    variances = tokens * (most - least) * (most - least)
    missing = (total - tl.sum(masses, 0)) / tl.maximum(tl.sum(variances, 0), 1e-30)
    return tl.maximum(masses + missing * variances, 0.0), tokens * least, tokens * most


@triton.jit
def _distance_of_mass(target, masses, cumulative):
    """Estimated distance at which a cumulative mass is reached."""
    bin = tl.minimum(tl.sum((cumulative < target).to(tl.int32), 0), BINS - 1)
    low, high = _bin_edges(bin)
    share = (target - _at(cumulative, bin - 1)) / tl.maximum(_at(masses, bin), 1e-30)
    share = tl.minimum(tl.maximum(share, 0.0), 1.0)
    return low - tl.log(1.0 - share * (1.0 - tl.exp(low - high)))


@triton.jit
def _distance_of_rank(rank, counts, cumulative):
    """Estimated distance of the token of a rank."""
    bin = tl.minimum(tl.sum((cumulative < rank).to(tl.int32), 0), BINS - 1)
    low, high = _bin_edges(bin)
    share = (rank - _at(cumulative, bin - 1)) / tl.maximum(_at(counts, bin), 1).to(tl.float32)
    share = tl.minimum(tl.maximum(share, 0.0), 1.0)
    return tl.where((bin == BINS - 1) & (rank > 0), _FARTHEST, low + share * (high - low))


@triton.jit
def _key(distance):
    """Key of a distance; above all keys where tokens have no weight."""
    key = tl.maximum(distance, 0.0).to(tl.int32, bitcast=True)
    return tl.where(distance >= _FARTHEST, LEAST + 1, key)


@triton.jit
def _window(distance, counts, cumulative, size):
    """Window of about `size` tokens, and of an eighth of a bin to either side if that is not many.

    The margin is for tokens that lie in lumps, as logits of few bits do.
    """
    bin = key_bins(distance.to(tl.int32, bitcast=True))
    low, high = _bin_edges(bin)
    tokens = tl.maximum(_at(counts, bin), 1).to(tl.float32)
    rank = _at(cumulative, bin - 1) + (distance - low) / (high - low) * tokens
    margin = (high - low) * tl.minimum(0.125, 0.75 * size / tokens)
    low = tl.minimum(_distance_of_rank(rank - size / 2, counts, cumulative), distance - margin)
    high = tl.maximum(_distance_of_rank(rank + size / 2, counts, cumulative), distance + margin)
    return _key(low), _key(high)


@triton.jit
def plan_row(
    counts, total, likely, seed, position, limits, vocab, LIMIT: tl.constexpr
):  # fmt: skip
    """Windows of top-k, of top-p and of the draw: low and high of each; the high is outside.

    One window from the likeliest token on is all three where what is kept lies in an eighth of what
    may be gathered. A window that is not needed is empty; the low of top-k's is -1 where top-k ends
    among tokens without weight.

    Args: counts, [BINS] int32; total and likely, masses of all tokens and of those min-p leaves.
    """
    top_k, top_p, min_p = limits
    whole = total.to(tl.float32) / ONE
    masses, least, most = _bin_masses(counts, whole)
    ranks = tl.cumsum(counts, 0)
    cumulative = tl.cumsum(masses, 0)
    head = ranks <= LIMIT // 8
    gathered = tl.max(tl.where(head, ranks, 0), 0)
    certain = tl.maximum(
        tl.sum(tl.where(head, least, 0.0), 0), whole - tl.sum(tl.where(head, 0.0, most), 0)
    )
    fits = tl.where(top_k > 0, top_k <= gathered, certain > top_p * whole * 1.00001)
    edge = tl.sum(head.to(tl.int32), 0)
    k_low, p_low, low = 0, 0, 0
    all_high = tl.where(edge == BINS, LEAST + 1, (edge + _FIRST_BIN) << _SHIFT)
    high = all_high
    k_high = tl.where(top_k > 0, all_high, 0)
    p_high = tl.where(top_p < 1, all_high, 0)
    if ((fits == 0) & (gathered < vocab)) | (edge == 0):
        size = LIMIT / (4.0 * (1 + (top_k > 0).to(tl.int32) + (top_p < 1).to(tl.int32)))
        kept = whole
        if top_k > 0:
            distance = _distance_of_rank(top_k.to(tl.float32), counts, ranks)
            bin = tl.minimum(tl.sum((ranks < top_k).to(tl.int32), 0), BINS - 1)
            if bin == BINS - 1:
                k_low, k_high = -1, -1
            else:
                k_low, k_high = _window(distance, counts, ranks, size)
                start, end = _bin_edges(bin)
                share = (1.0 - tl.exp(start - distance)) / (1.0 - tl.exp(start - end))
                kept = _at(cumulative, bin - 1) + _at(masses, bin) * share
        limited = kept
        if top_p < 1:
            limited = kept * tl.maximum(top_p, 0.0)
            distance = _distance_of_mass(limited, masses, cumulative)
            p_low, p_high = _window(distance, counts, ranks, size)
        if min_p > 0:
            limited = tl.minimum(limited, tl.maximum(likely.to(tl.float32) / ONE, 1.0))
        drawn = draw_target(seed, position, tl.full((), 1, tl.int64) * ONE).to(tl.float32) / ONE
        distance = _distance_of_mass(drawn * limited, masses, cumulative)
        low, high = _window(distance, counts, ranks, size)
    return k_low, k_high, p_low, p_high, low, high


@triton.jit
def moved(target, window, overflowed):
    """Low and high of a window, (low, high, sums below), whose tokens did not decide.

    A window that missed its target goes on beyond its end, as far as the target would be if tokens
    were as dense as within, and its own width more; but no farther than three widths. One that
    has it, where the buffer overflowed, shrinks to a quarter, about where the target would be.
    """
    low, high, below_low, below_high = window
    start = tl.minimum(low.to(tl.float32, bitcast=True), _FARTHEST)
    end = tl.minimum(high.to(tl.float32, bitcast=True), _FARTHEST)
    width = tl.maximum(end - start, 1e-6)
    rate = tl.maximum((below_high - below_low).to(tl.float32), 1.0) / width
    before = (below_low - target).to(tl.float32) / rate
    after = (target - below_high).to(tl.float32) / rate
    middle = start - before
    inside = overflowed & (high > 0)
    new_low = tl.where(inside, _key(middle - width / 8), low)
    new_high = tl.where(inside, tl.maximum(_key(middle + width / 8), new_low + 1), high)
    if target <= below_low:
        new_low = _key(start - width - tl.minimum(before, 2 * width))
        new_high = low
    if target > below_high:
        new_low = high
        new_high = _key(end + width + tl.minimum(after, 2 * width))
    return new_low, new_high
