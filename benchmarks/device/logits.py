"""How far bfloat16 logits are from float64 ones: memd's on a GPU, and transformers'.

    python benchmarks/device/logits.py [--layers 30]

The shape of SmolLM2 with random weights, prompts of several lengths; transformers in float64 on the
same weights is the truth. Exits 1 where memd's error is above transformers' by more than a tenth.
"""

import argparse
import sys
from dataclasses import replace

import torch
import transformers
from torch import Tensor

from memd.bench.shapes import SHAPES, random_tensors
from memd.models.config import ModelConfig
from memd.models.decoder import Decoder, ForwardBatch

DEVICE = torch.device("cuda", 0)
LENGTHS = (1, 7, 64, 333, 1024)
MOST_ABOVE = 1.1
PAGE_TOKENS = 64


def peer(config: ModelConfig, tensors: dict[str, Tensor], dtype: torch.dtype) -> torch.nn.Module:
    """transformers' model with the same parameters."""
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation="sdpa",
        )
    )
    names = {f"model.{name}": tensor for name, tensor in tensors.items()}
    missing, unexpected = model.load_state_dict(names, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model.to(DEVICE, dtype).eval()


def ours(config: ModelConfig, decoder: Decoder, prompt: Tensor) -> Tensor:
    """Logits of the prompt's last token, prefilled but for it, which is then decoded."""
    length = len(prompt)
    pages = -(-length // PAGE_TOKENS)
    page = (config.num_layers, 2, config.num_kv_heads, PAGE_TOKENS, config.head_dim)
    kv = torch.full((1, pages, *page), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    table = torch.randperm(pages, device=DEVICE).int()[None]
    logits = torch.empty(0)
    for first, last in ((0, length - 1), (length - 1, length)):
        if first == last:
            continue
        positions = torch.arange(first, last, device=DEVICE)
        decodes = int(last == length)
        starts = [0] if decodes else [0, last - first]
        logits = decoder.forward(
            ForwardBatch(
                token_ids=prompt[first:last],
                positions=positions,
                write_pages=table[0, positions // PAGE_TOKENS].long(),
                write_offsets=positions % PAGE_TOKENS,
                page_table=table,
                num_decodes=decodes,
                query_starts=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
                kv_lens=torch.tensor([last], dtype=torch.int32, device=DEVICE),
                logits_rows=torch.tensor([last - first - 1], device=DEVICE),
            ),
            kv,
        )
    return logits[0].double()


@torch.inference_mode()
def main() -> int:
    """Print both errors for each length."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=30)
    layers = parser.parse_args().layers
    config = replace(SHAPES["smol135m"], num_layers=layers, windows=(None,) * layers)
    tensors = random_tensors(config, torch.bfloat16, DEVICE)
    # Larger than trained weights: attention is then far from uniform.
    tensors = {name: each * 2 if each.ndim > 1 else each for name, each in tensors.items()}
    truth, theirs = (peer(config, tensors, dtype) for dtype in (torch.float64, torch.bfloat16))
    decoder = Decoder(config, tensors, DEVICE)
    wrong = 0
    for length in LENGTHS:
        prompt = torch.randint(10, config.vocab_size, (length,), device=DEVICE)
        right = truth(prompt[None]).logits[0, -1]
        errors = [
            float((logits - right).norm() / right.norm())
            for logits in (
                ours(config, decoder, prompt),
                theirs(prompt[None]).logits[0, -1].double(),
            )
        ]
        wrong += not errors[0] <= MOST_ABOVE * errors[1]
        print(f"{length:5d} tokens: memd {errors[0]:.5f}, transformers {errors[1]:.5f}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main()))
