"""The arithmetic of a draw, for the kernels of `sample`: weights, uniform numbers, inversion.

A token's key is the bits of (largest logit - its logit) / temperature, a float that is not
negative, as an integer: smaller for likelier tokens, equal for equally likely ones. Its weight is
exp(-key) as a multiple of 2**-40, an integer: sums are exact, so they do not depend on their order,
and what is drawn does not depend on how a row is cut into chunks.

Nothing is sorted. Where tokens are taken by descending probability, the key at which a count or a
mass is reached is searched for, and among tokens of that key the id.
"""

import triton
import triton.language as tl

LEAST = tl.constexpr(0x7F800000)  # key of a token that is never drawn
NO_TOKEN = tl.constexpr(0x7FFFFFFF)  # above all keys and ids
ONE = tl.constexpr(1 << 40)  # weight of the most likely token
COUNT = tl.constexpr(0)  # what is summed up to a key: tokens,
MASS = tl.constexpr(1)  # their weights,
IDS = tl.constexpr(2)  # or, up to an id, the tokens of one key
_PROBES = tl.constexpr(4)  # keys tried at once
_TILE = tl.constexpr(2048)


@triton.jit
def row_top(most_ptr, first_ptr, row, chunks, CHUNKS: tl.constexpr):
    """Largest logit of a row, its lowest id, and whether the logits are no numbers to draw from."""
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    most = tl.load(most_ptr + row * chunks + chunk, inside, -float("inf"))  # [CHUNKS]
    first = tl.load(first_ptr + row * chunks + chunk, inside, 0)
    top = tl.max(most, 0)
    # Not a number where a chunk has NaN; a maximum passes over it.
    failed = (tl.sum((most != most).to(tl.int32), 0) > 0) | (tl.abs(top) == float("inf"))
    token = tl.min(tl.where(most == top, first, NO_TOKEN), 0)
    return top, tl.where(failed, 0, token), failed


@triton.jit
def row_limits(top_k_ptr, top_p_ptr, row, vocab):
    """top_k (0: off) and top_p of a row, and whether they make its tokens be ranked."""
    top_k = tl.load(top_k_ptr + row).to(tl.int64)
    top_k = tl.where((top_k > 0) & (top_k < vocab), top_k, 0)
    top_p = tl.load(top_p_ptr + row)
    return top_k, top_p, (top_k > 0) | (top_p < 1)


@triton.jit
def load_logits(pointers, inside):
    """Logits in float32, whatever they are kept in; -inf where there are none."""
    return tl.load(pointers, inside, -float("inf")).to(tl.float32)


@triton.jit
def token_keys(logits, top, temperature):
    """Keys of logits, int32; the division is rounded as the reference's is."""
    return tl.div_rn(top - logits, tl.zeros_like(logits) + temperature).to(tl.int32, bitcast=True)


@triton.jit
def token_weights(keys):
    """Weights of keys, int64.

    Accurate to the hardware's exp2: what rounding the product with log2(e) loses is put back.
    """
    negative_log2_e: tl.constexpr = -1.4426950408889634
    distance = tl.minimum(keys.to(tl.float32, bitcast=True), 200.0)
    high = distance * negative_log2_e
    low = tl.fma(distance, tl.full(distance.shape, negative_log2_e, tl.float32), -high)
    power = tl.exp2(high)
    power = tl.fma(power, low * 0.6931471805599453, power)
    return (power * 1099511627776.0).to(tl.int64)


@triton.jit
def least_weight(min_p):
    """Weight that a token must have for min-p."""
    return (tl.minimum(min_p, 2.0) * 1099511627776.0).to(tl.int64)


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    bits = (bits ^ (bits >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return bits ^ (bits >> 31)


@triton.jit
def draw_target(seed, position, mass):
    """floor(uniform(seed, position) * mass), exactly; the uniform number is the reference's."""
    step = position.to(tl.uint64, bitcast=True) * tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    bits = _mix(_mix(seed.to(tl.uint64, bitcast=True)) + step)
    bits = (bits >> 12) << 12  # 52 of them, as a fraction of 2**64
    return tl.umulhi(bits, mass.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)


@triton.jit
def least_mass(top_p, mass):
    """The least integer that is not below top_p * mass, and not above the mass."""
    wanted = tl.maximum(top_p, 0.0).to(tl.float64) * mass.to(tl.float64)
    whole = wanted.to(tl.int64)
    return tl.minimum(whole + (whole.to(tl.float64) < wanted).to(tl.int64), mass)


@triton.jit
def _tokens(source, start, ROW: tl.constexpr):
    """Keys and ids, [_TILE], of the tokens gathered, or of the logits of a ROW, from `start` on.

    `source` is (pointer to keys or logits, pointer to ids, number of tokens, largest logit,
    temperature).
    """
    values_ptr, ids_ptr, size, top, temperature = source
    slot = start + tl.arange(0, _TILE)
    if ROW:
        logits = tl.load(values_ptr + slot, slot < size, -float("inf"))
        return tl.where(slot < size, token_keys(logits, top, temperature), NO_TOKEN), slot
    else:
        keys = tl.load(values_ptr + slot, slot < size, NO_TOKEN)
        return keys, tl.load(ids_ptr + slot, slot < size, NO_TOKEN)


@triton.jit
def _places(keys, ids, key, WHAT: tl.constexpr):
    """What is searched for: keys, or ids of the tokens of a key."""
    return tl.where(keys == key, ids, NO_TOKEN) if WHAT == IDS else keys


@triton.jit
def _sums(probes, first, key, source, WHAT: tl.constexpr, ROW: tl.constexpr):
    """Sums, [_PROBES] int64, over the tokens whose place is at least `first` up to each probe."""
    sums = tl.zeros((_PROBES, _TILE), tl.int64)
    for start in range(0, source[2], _TILE):
        keys, ids = _tokens(source, start, ROW)
        values = token_weights(keys) if WHAT == MASS else tl.full((_TILE,), 1, tl.int64)
        places = _places(keys, ids, key, WHAT)
        places = tl.where(places >= first, places, NO_TOKEN)
        sums += tl.where(places[None, :] <= probes[:, None], values[None, :], 0)
    return tl.sum(sums, 1)


@triton.jit
def _ends(low, high, key, source, WHAT: tl.constexpr, ROW: tl.constexpr):
    """The first and the last place that a token has, from `low` to `high`, where some has one."""
    first = tl.full((_TILE,), NO_TOKEN, tl.int32)
    last = tl.full((_TILE,), 0, tl.int32)
    for start in range(0, source[2], _TILE):
        keys, ids = _tokens(source, start, ROW)
        places = _places(keys, ids, key, WHAT)
        inside = (places >= low) & (places <= high)
        first = tl.minimum(first, tl.where(inside, places, NO_TOKEN))
        last = tl.maximum(last, tl.where(inside, places, 0))
    return tl.min(first, 0), tl.max(last, 0)


@triton.jit
def _search(target, low, high, below, key, source, WHAT: tl.constexpr, ROW: tl.constexpr):
    """The least place up to which the sum is at least the target, and the sum before it.

    It must lie from `low` to `high`; `below` is the sum before `low`.
    """
    first = low
    before = below
    while low < high:
        step = (high - low + _PROBES) // (_PROBES + 1)
        probes = tl.minimum(low + step * (tl.arange(0, _PROBES) + 1), high - 1)
        sums = below + _sums(probes, first, key, source, WHAT, ROW)
        short = sums < target
        before = tl.maximum(before, tl.max(tl.where(short, sums, 0), 0))
        low = tl.maximum(low, tl.max(tl.where(short, probes + 1, 0), 0))
        high = tl.minimum(high, tl.min(tl.where(short, NO_TOKEN, probes), 0))
    return low, before


@triton.jit
def in_window(target, window):
    """Whether the key at which a target is reached lies in a window: (low, high, sums below)."""
    _, _, below_low, below_high = window
    return (below_low < target) & (target <= below_high)


@triton.jit
def _reach(target, window, source, WHAT: tl.constexpr, ROW: tl.constexpr):
    """The key at which a target is reached, and the sum before it.

    Of what was gathered, a window that has not the key gives its low; a row's key may be anywhere.
    """
    low, high, below, _ = window
    inside = in_window(target, window)
    if ROW:
        low, high = tl.where(inside, low, 0), tl.where(inside, high - 1, LEAST)
        below = tl.where(inside, below, 0)
        low, high = _ends(low, high, 0, source, WHAT, ROW)
    else:
        high = tl.where(inside, high - 1, low)
    return _search(target, low, high, below, 0, source, WHAT, ROW)


@triton.jit
def _mass_between(low, high, source, ROW: tl.constexpr):
    """Mass of the source's keys from `low` to below `high`."""
    probes = tl.full((_PROBES,), 0, tl.int32) + (high - 1)
    return tl.max(_sums(probes, low, 0, source, MASS, ROW), 0)


@triton.jit
def draw_by_rank(seed, position, total, likely, limits, windows, source, ROW: tl.constexpr):
    """Invert the distribution of the tokens that are kept, the most likely first; ties by id.

    Args: total and likely, masses of all tokens and of those that min-p leaves; limits, (top_k,
    top_p, min_p), top_k 0: off; windows, of the keys where top-k, top-p and the draw end: (low,
    high, sum below low, sum below high), then the mass that lies below the low of the first.

    Returns the token; the masses at which top-p and the draw end; whether the windows had all keys.
    Where not, the masses are estimates, and the token is 0 unless the source is a ROW.
    """
    top_k, top_p, min_p = limits
    k_window, p_window, window, k_mass = windows
    kept = total
    sound = total > 0
    if top_k > 0:
        key, before = _reach(top_k, k_window, source, COUNT, ROW)
        kept = (top_k - before) * token_weights(key)
        if ROW:
            kept += _mass_between(0, key, source, ROW)
        else:
            kept += k_mass + _mass_between(k_window[0], key, source, ROW)
        sound = in_window(top_k, k_window)
    kept = tl.minimum(tl.maximum(kept, 1), total)
    limited = kept
    if min_p > 0:  # the first always stays
        limited = tl.minimum(kept, tl.maximum(likely, ONE))
    wanted = tl.maximum(least_mass(top_p, kept), 1)
    if top_p < 1:
        key, before = _reach(wanted, p_window, source, MASS, ROW)
        weight = tl.maximum(token_weights(key), 1)
        taken = tl.maximum((wanted - before + weight - 1) // weight, 1)
        inside = in_window(wanted, p_window)
        limited = tl.minimum(limited, tl.where(inside | ROW, before + taken * weight, wanted))
        sound &= inside
    target = draw_target(seed, position, limited) + 1
    key, before = _reach(target, window, source, MASS, ROW)
    sound &= in_window(target, window)
    token = tl.full((), 0, tl.int32)
    if sound | ROW:
        tie = (target - before - 1) // tl.maximum(token_weights(key), 1) + 1  # the first is 1
        first, last = _ends(0, NO_TOKEN - 1, key, source, IDS, ROW)
        last = tl.where(tie > 1, last, first)
        token, _ = _search(tie, first, last, tie * 0, key, source, IDS, ROW)
    return token, wanted, target, sound
