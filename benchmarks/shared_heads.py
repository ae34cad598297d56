"""What it costs to share KV heads: perplexity for every number of heads, and by averaging heads.

    python benchmarks/shared_heads.py --model smollm2-135m --tokens 2048

The text is CPython's help topics, which every machine has. Heads are compared and joined over its
first half, perplexity is of the second.
"""

import argparse
import pydoc_data.topics
from dataclasses import replace

import torch

from memd.analysis.shared_heads import HeadAnalysis, perplexity
from memd.automatic import dtype_for
from memd.models.checkpoint import load_tensors
from memd.models.config import ModelConfig
from memd.models.decoder import Decoder
from memd.models.head_plan import HeadPlan, LayerClusters
from memd.models.hub import ModelFiles, read_config, resolve
from memd.models.shared_heads import share_heads
from memd.models.tokenizer import load_tokenizer


def averaged(plan: HeadPlan) -> HeadPlan:
    """The same clusters, with the mean of keys and values: both sides take 1 / sqrt(n)."""

    def parts(layer: LayerClusters) -> tuple[bytes, bytes]:
        shares = [len(members) ** -0.5 for members in layer if len(members) > 1 for _ in members]
        if not shares:
            return b"", b""
        scale = torch.tensor(shares)
        values = scale[:, None, None] * torch.eye(plan.head_dim)
        keys = torch.zeros((len(shares), plan.key_pairs, 2))
        keys[..., 0] = scale[:, None]
        return values.numpy().tobytes(), keys.numpy().tobytes()

    found = [parts(layer) for layer in plan.clusters]
    return replace(plan, values=tuple(v for v, _ in found), keys=tuple(k for _, k in found))


def perplexity_of(
    files: ModelFiles,
    config: ModelConfig,
    plan: HeadPlan,
    tokens: torch.Tensor,
    dtype: torch.dtype,
) -> float:
    """With a plan applied."""
    tensors = load_tensors(files, config, dtype, tokens.device)
    shared = share_heads(tensors, config, plan)
    decoder = Decoder(shared, tensors, tokens.device)
    with torch.inference_mode():
        return perplexity(decoder, shared, tokens, dtype)


def main() -> None:
    """Print a table, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    files = resolve(given.model)
    config = read_config(files)
    tokenizer = load_tokenizer(files, config)
    if tokenizer is None:
        raise SystemExit(f"{given.model} has no tokenizer")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, dtype_for(config.dtype, device.type))
    text = "\n".join(pydoc_data.topics.topics.values())
    ids = tokenizer.encode(text[: 20 * given.tokens], True)[: given.tokens]
    analysis = HeadAnalysis(files, config, device, dtype)
    measured = torch.tensor(ids[len(ids) // 2 :], device=device)
    before = config.kv_bytes_per_token(dtype.itemsize)
    rows: list[tuple[object, ...]] = []
    for kv_heads in range(config.num_kv_heads - 1, 0, -1):
        found = analysis.run(ids, 1.0, kv_heads)
        assert found.plan is not None
        assert found.chosen is not None
        assert found.shared_perplexity is not None
        if not rows:
            heads = (config.num_kv_heads, config.num_heads)
            rows.append((*heads, before, f"{found.perplexity:.2f}", "", "", ""))
        rows.append(
            (
                kv_heads,
                found.chosen.query_heads,
                before * kv_heads // config.num_kv_heads,
                f"{found.shared_perplexity:.2f}",
                f"{found.shared_perplexity / found.perplexity - 1:+.0%}",
                f"{perplexity_of(files, config, averaged(found.plan), measured, dtype):.0f}",
                f"{found.chosen.mean_similarity:.2f}",
            )
        )
    heads = ("KV heads", "query heads", "KV bytes a token", "perplexity", "rise")
    print("|", " | ".join((*heads, "heads averaged", "similarity")), "|")
    print("|" + "---|" * 7)
    for row in rows:
        print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    main()
