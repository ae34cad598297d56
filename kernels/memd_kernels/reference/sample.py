"""Stateless sampling, and log-probabilities of tokens.

The randomness of a draw is a function of the sequence's seed and the token's position alone, and
each row is computed by itself: a sequence continues the same whatever batch it is in and however
often it is resumed.
"""

import torch
from torch import Tensor

LOGITS_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_GOLDEN = 0x9E3779B97F4A7C15
_HEAD = 1024  # most likely tokens tried before a full sort, which costs ten times as much


def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw one token for each row.

    Temperature first, then top-k, top-p on what that leaves, then min-p; the most likely token
    always stays. The draw inverts the cumulative distribution: of tokens by descending probability
    (equal ones by id) where top-k or top-p is on, of tokens by id where not.

    Shapes:
        logits: [R, vocab_size], float32, float16 or bfloat16; -inf: never drawn.
        seeds, positions: [R], int64.
        temperature: [R], float32; 0: the most likely token, the lowest id if there are several.
        top_k: [R], int64; 0, or vocab_size and more: off.
        top_p: [R], float32; 1 and more: off.
        min_p: [R], float32; least probability relative to the most likely token's; 0: off.

    Returns:
        [R], int64, token ids; [R], bool, rows that failed: their largest logit is NaN or infinite,
        and their token is some id within the vocabulary.

    Raises:
        ValueError: a shape or dtype does not match the above.

    Notes:
        Reads on the host which rows need what, so on CUDA it waits for the device.

    Source:
        Top-p: Holtzman et al., arXiv 1904.09751. Min-p: Nguyen et al., arXiv 2407.01082.
    """
    check_sample(logits, seeds, positions, temperature, top_k, top_p, min_p)
    tokens, failed = argmax(logits)
    drawn = temperature > 0
    filtered = drawn & ((top_p < 1) | ((top_k > 0) & (top_k < logits.shape[1])))
    for rows, pick in ((drawn & ~filtered, _pick_by_id), (filtered, _pick_by_rank)):
        if rows.any():
            scaled = logits[rows].float()
            # The largest is made 0 before scaling, so that no temperature overflows.
            scaled = (scaled - scaled.amax(-1, keepdim=True)) / temperature[rows, None]
            draws = uniform(seeds[rows], positions[rows])
            limit = top_k[rows]
            limit = limit.masked_fill(limit >= logits.shape[1], 0)
            tokens[rows] = pick(scaled, draws, limit, top_p[rows], min_p[rows])
    return tokens, failed


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token of each row, the lowest id if there are several.

    Shapes:
        logits: [R, vocab_size], float32, float16 or bfloat16.

    Returns:
        As `sample`.

    Raises:
        ValueError: the shape or dtype does not match the above.
    """
    check_logits(logits)
    most, tokens = logits.float().max(-1)
    return tokens, ~most.isfinite()


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) for each (seed, position), the same bits on every device.

    Shapes:
        seeds, positions: [R], int64.

    Returns:
        [R], float64, multiples of 2**-52.

    Source:
        The mixing function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), applied to the seed,
        then to the mixed seed advanced by the position.
    """
    bits = _mix(_mix(seeds) + positions * _signed(_GOLDEN))
    return _shift_right(bits, 12).double() * 2.0**-52


def token_logprobs(
    logits: Tensor, token_ids: Tensor, top: int, vocab_size: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Natural log-probabilities of given tokens and of the most likely ones.

    Shapes:
        logits: [R, N], float32.
        token_ids: [R], int64.

    Args:
        logits: All N weigh in the probabilities.
        token_ids: Whose log-probability is wanted.
        top: How many alternatives, at most vocab_size.
        vocab_size: Ids that may be alternatives are below it; None: N.

    Returns:
        Log-probabilities of `token_ids`, [R] float32; of the `top` most likely tokens, [R, top]
        float32, best first; the ids of those, [R, top] int64.

    Raises:
        ValueError: a shape, `top` or `vocab_size` does not match the above.
    """
    vocab_size = logits.shape[-1] if vocab_size is None else vocab_size
    if logits.ndim != 2 or token_ids.shape != logits.shape[:1]:
        raise ValueError(f"token_ids are {tuple(token_ids.shape)}, logits {tuple(logits.shape)}")
    if not 0 <= top <= vocab_size <= logits.shape[1]:
        raise ValueError(f"top is {top} of {vocab_size} tokens, logits have {logits.shape[1]}")
    total = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None]) - total
    values, ids = logits[:, :vocab_size].topk(top)
    return chosen.squeeze(1), values - total, ids


def _pick_by_id(
    scaled: Tensor, draws: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    weights = scaled.exp_()  # of the most likely token: 1
    weights.masked_fill_(weights < min_p[:, None].clamp(max=1), 0)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    return _invert(cumulative, draws * cumulative[:, -1])


def _pick_by_rank(
    scaled: Tensor, draws: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    head = min(_HEAD, scaled.shape[1])
    # Ids ascending before the stable sort, because topk returns equal values in any order.
    ids = scaled.topk(head).indices.sort().values
    values, order = scaled.gather(1, ids).sort(descending=True, stable=True)
    limits = top_k, top_p, min_p, scaled.exp().sum(-1, dtype=torch.float64)
    ranks, kept = _draw_rank(values, draws, *limits)
    tokens = ids.gather(1, order.gather(1, ranks)).squeeze(1)
    # Beyond the head lie tokens as likely as its last: up to there the order is not certain. And
    # the mass of more tokens than the head has is not known.
    unsure = (values.gather(1, kept - 1).squeeze(1) <= values[:, -1]) | (top_k > head)
    if head < scaled.shape[1] and unsure.any():
        values, order = scaled[unsure].sort(descending=True, stable=True)
        ranks, _ = _draw_rank(values, draws[unsure], *(limit[unsure] for limit in limits))
        tokens[unsure] = order.gather(1, ranks).squeeze(1)
    return tokens


def _draw_rank(
    values: Tensor, draws: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """Rank drawn and number of leading ranks kept, each [R, 1], of descending log-weights [R, N].

    `total`, [R], is the weight of the whole vocabulary. Each filter keeps a leading part.
    """
    weights = values.exp()
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    unlimited = (top_k <= 0)[:, None]
    kept = top_k[:, None].clamp(max=values.shape[1]).masked_fill(unlimited, values.shape[1])
    mass = torch.where(unlimited, total[:, None], cumulative.gather(1, kept - 1))
    inside_p = (cumulative[:, :-1] < top_p[:, None] * mass).sum(-1, keepdim=True) + 1
    inside_p.masked_fill_(top_p[:, None] >= 1, values.shape[1])
    inside_min = (weights >= min_p[:, None]).sum(-1, keepdim=True).clamp(min=1)
    kept = torch.minimum(torch.minimum(kept, inside_p), inside_min)
    rank = _invert(cumulative, draws * cumulative.gather(1, kept - 1).squeeze(1))
    return rank[:, None], kept


def _invert(cumulative: Tensor, targets: Tensor) -> Tensor:
    """First index of each row whose cumulative weight exceeds the target.

    A target is at most 1 - 2**-52 of a cumulative weight, hence below it after rounding too.
    """
    found = torch.searchsorted(cumulative, targets[:, None], right=True).squeeze(1)
    return found.clamp_(max=cumulative.shape[1] - 1)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant


def check_logits(logits: Tensor) -> None:
    """Raise ValueError where logits are not what `argmax` and `sample` take."""
    if logits.ndim != 2 or logits.dtype not in LOGITS_DTYPES:
        raise ValueError(
            f"logits are {tuple(logits.shape)} {logits.dtype}, not [rows, vocab] of "
            f"{', '.join(str(dtype) for dtype in LOGITS_DTYPES)}"
        )


def check_sample(logits: Tensor, seeds: Tensor, positions: Tensor, *others: Tensor) -> None:
    """Raise ValueError where the arguments of `sample` do not fit."""
    check_logits(logits)
    for name, values in zip(
        ("seeds", "positions", "temperature", "top_k", "top_p", "min_p"),
        (seeds, positions, *others),
        strict=True,
    ):
        if values.shape != logits.shape[:1]:
            raise ValueError(f"{name} is {tuple(values.shape)}, logits have {len(logits)} rows")
    if seeds.dtype != torch.int64 or positions.dtype != torch.int64:
        raise ValueError(
            f"seeds are {seeds.dtype}, positions {positions.dtype}; both must be int64"
        )
