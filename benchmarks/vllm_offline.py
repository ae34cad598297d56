"""vLLM on the cases of the offline benchmark, driven by `beside_vllm.py`.

    python benchmarks/vllm_offline.py --shape llama8b --memory-share 0.45

Needs a Python environment with vLLM, and this repository on its path. Random weights in the shape
of the model; vLLM's defaults otherwise: CUDA graphs, greedy, no detokenisation.
"""

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path

from memd.bench.cases import Case, listen

_COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
CONFIGS = {
    "llama8b": {
        **_COMMON,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 500000.0,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "smol135m": {
        **_COMMON,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_theta": 100000.0,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
}


def main() -> None:
    """Load the model, then run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=CONFIGS, default="llama8b")
    parser.add_argument("--memory-share", type=float, default=0.45)
    options = parser.parse_args()
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams

    config = CONFIGS[options.shape]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=8192,
            gpu_memory_utilization=options.memory_share,
            enable_prefix_caching=True,
            enable_flashinfer_autotune=False,
            disable_log_stats=True,
        )
    rng = random.Random(1)

    def run(case: Case) -> float:
        prompts = [
            {"prompt_token_ids": tokens} for tokens in case.prompts(rng, config["vocab_size"])
        ]
        sampling = SamplingParams(
            max_tokens=case.output_tokens, ignore_eos=True, temperature=0.0, detokenize=False
        )
        started_at = time.perf_counter()
        outputs = model.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started_at
        tokens = sum(len(each.outputs[0].token_ids) for each in outputs)
        assert tokens == case.requests * case.output_tokens, tokens
        return seconds

    listen(run)


if __name__ == "__main__":
    main()
