"""`memd plan`, against arithmetic done by hand."""

import json

import pytest

from memd.cli import plan

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
LARGE = SMALL | {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


@pytest.fixture
def plan_of(tmp_path, memd):
    def run(config, *options):
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        result = memd("plan", str(tmp_path), "--format", "json", *options)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


def test_a_small_model(plan_of):
    facts = plan_of(
        SMALL, *["--memory", "1GiB", "--context", "2048", "--device", "cuda", "--page-tokens", "16"]
    )
    assert facts["token_bytes"] == 30 * 2 * 3 * 64 * 2 == 23040
    assert facts["page_bytes"] == 16 * 23040
    assert facts["weights_bytes"] == 134_515_008 * 2
    assert facts["block_bytes"] % (2 << 20) == 0
    assert facts["block_waste_bytes"] == (
        facts["block_bytes"] - facts["pages_per_block"] * facts["page_bytes"]
    )
    assert facts["pool_blocks"] == (1 << 30) // facts["block_bytes"]
    assert facts["pool_tokens"] == 16 * facts["pool_blocks"] * facts["pages_per_block"]
    assert facts["sequences_of_context"] == facts["pool_pages"] // 128
    assert facts["longest_context_tokens"] == 8192


def test_a_large_model_whose_context_no_pool_of_that_size_holds(plan_of):
    facts = plan_of(LARGE, "--memory", "8GB", "--device", "cuda")
    assert facts["token_bytes"] == 131072
    assert facts["weights_bytes"] == 8_030_261_248 * 2
    assert facts["longest_context_tokens"] == facts["pool_tokens"] < 8e9 / 131072
    assert facts["context_tokens"] == 4096
    assert facts["sequences_of_context"] == facts["pool_pages"] // 64


@pytest.mark.parametrize(("memory", "pages"), [("100KB", 0), ("1MB", 1), ("3MB", 4)])
def test_memory_for_less_than_a_block(plan_of, memory, pages):
    facts = plan_of(SMALL, "--memory", memory, "--device", "cpu", "--dtype", "float32")
    assert facts["pool_pages"] == pages
    assert facts["pool_blocks"] == min(1, pages)
    assert facts["longest_context_tokens"] == 16 * pages


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_granules_are_the_drivers(device):
    from memd.arena.cpu import CpuDriver
    from memd.arena.single import SingleAllocationDriver

    driver = {"cpu": CpuDriver, "cuda": SingleAllocationDriver}[device]
    assert plan.GRANULE_BYTES[device] == driver.granule_bytes


def test_dtype_doubles_and_halves(plan_of):
    halves = plan_of(SMALL, "--memory", "1GB", "--dtype", "bfloat16")
    whole = plan_of(SMALL, "--memory", "1GB", "--dtype", "float32")
    assert whole["token_bytes"] == 2 * halves["token_bytes"]


def test_a_context_beyond_the_model_fits_no_time(plan_of):
    assert plan_of(SMALL, "--memory", "9GB", "--context", "9000")["sequences_of_context"] == 0


def test_without_memory_it_takes_this_machine(plan_of):
    facts = plan_of(SMALL, "--device", "cpu")
    assert facts["memory_bytes"] > 0
    assert facts["memory_from"].startswith("80% of ")


@pytest.mark.parametrize("memory", ["5", "0GB", "much", "-1GB"])
def test_bad_memory(tmp_path, memd, memory):
    (tmp_path / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
    result = memd("plan", str(tmp_path), "--memory", memory)
    assert result.exit_code == 2
    assert "--memory" in result.stderr


def test_a_model_that_is_not_there(memd):
    result = memd("plan", "/nonexistent/model")
    assert result.exit_code == 1
    assert "/nonexistent/model" in result.stderr


@pytest.mark.parametrize(("form", "least"), [("int8", 1.8), ("int4", 3.2)])
def test_packed_pages_hold_more_tokens(plan_of, form, least):
    options = ["--memory", "20GiB", "--device", "cuda", "--context", "8192"]
    full = plan_of(SMALL, *options)
    packed = plan_of(SMALL, *options, "--kv-format", form)
    assert packed["kv_format"] == form
    assert packed["page_tokens"] == full["page_tokens"] == 64
    ratio = packed["sequences_of_context"] / full["sequences_of_context"]
    assert ratio >= least
    page_ratio = packed["page_bytes"] / packed["packed_page_bytes"]
    assert ratio < page_ratio < 4
    assert packed["pool_tokens"] / full["pool_tokens"] == pytest.approx(page_ratio, rel=0.04)


def test_packed_pages_by_hand(plan_of):
    facts = plan_of(
        SMALL, "--memory", "64MiB", "--device", "cpu", "--dtype", "float32", "--kv-format", "int8"
    )
    assert facts["page_tokens"] == 64  # on a CPU, too
    per_head = 64 * 64 + 64 * 2 + 64 + 64 * 64 + 64 * 2 + 64
    assert facts["packed_page_bytes"] == -(-30 * 3 * per_head // 256) * 256
    blocks, context = facts["pool_blocks"], facts["longest_context_tokens"]
    packed = -(-(context // 64 - 4) // facts["packed_pages_per_block"])
    assert packed + -(-5 // facts["pages_per_block"]) in (blocks, blocks - 1)


def test_packed_pages_on_disk_take_their_own_room(plan_of):
    options = ["--memory", "1GiB", "--device", "cuda", "--disk", "1GiB"]
    full, packed = plan_of(SMALL, *options), plan_of(SMALL, *options, "--kv-format", "int8")
    assert full["disk_packed_pages"] is None
    assert full["disk_tokens"] == 64 * full["disk_pages"] == 64 * packed["disk_pages"]
    assert packed["disk_tokens"] == 64 * packed["disk_packed_pages"]
    file_bytes = 168 + 64 * 4 + packed["packed_page_bytes"]
    room_bytes = -(-(file_bytes + 128) // 4096) * 4096
    assert packed["disk_packed_pages"] == (2**30 - 18 * 4096) // room_bytes
    assert packed["disk_tokens"] > 1.8 * full["disk_tokens"]


@pytest.mark.parametrize("tokens", ["8", "48"])
def test_pages_that_cannot_be_packed(tmp_path, memd, tokens):
    (tmp_path / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
    options = ["--memory", "1GB", "--page-tokens", tokens, "--kv-format", "int8"]
    result = memd("plan", str(tmp_path), *options)
    assert result.exit_code == 2
    words = result.stderr.replace("│", " ").split()
    assert "power of two from 16 on" in " ".join(words)


def test_what_bounds_a_sequence_lets_more_of_them_fit(plan_of):
    """Pages of one of 8,000 tokens: by hand."""
    base = ["--memory", "1GiB", "--context", "8000", "--device", "cuda", "--page-tokens", "16"]
    whole = plan_of(SMALL, *base)
    assert (whole["window_tokens"], whole["budget_tokens"]) == (None, None)
    assert whole["pages_of_context"] == 500
    window = plan_of(SMALL, *base, "--window", "1024")
    # Sinks and window shared, a window and a chunk of one behind it.
    assert window["window_tokens"] == 1024
    assert window["pages_of_context"] == -(-1028 // 16) + 128
    budget = plan_of(SMALL, *base, "--budget", "1000")
    assert budget["budget_tokens"] == 992  # whole pages
    assert budget["pages_of_context"] == 62
    for facts in (whole, window, budget):
        assert facts["sequences_of_context"] == facts["pool_pages"] // facts["pages_of_context"]
        assert facts["longest_context_tokens"] == min(8192, facts["pool_tokens"]) or (
            facts["pages_of_context"] <= facts["pool_pages"]
        )


def test_a_bound_lets_a_small_pool_serve_the_models_length(plan_of):
    base = ["--memory", "48MiB", "--device", "cuda", "--page-tokens", "16"]
    assert plan_of(SMALL, *base)["longest_context_tokens"] < 8192
    assert plan_of(SMALL, *base, "--budget", "512")["longest_context_tokens"] == 8192
    endless = plan_of(SMALL, *base, "--window", "256", "--context", "100000")
    assert endless["sequences_of_context"] > 0
    assert plan_of(SMALL, *base, "--context", "100000")["sequences_of_context"] == 0


def test_a_models_own_window_counts(plan_of):
    mistral = SMALL | {"model_type": "mistral", "sliding_window": 1024}
    facts = plan_of(mistral, "--memory", "1GiB", "--context", "8000", "--page-tokens", "16")
    assert (facts["window_tokens"], facts["pages_of_context"]) == (1024, 64 + 128)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "40"], "needs 48 tokens or more"),
        (["--budget", "400", "--window", "64"], "not together with --window"),
        (["--budget", "400", "--kv-format", "int8"], "not together with --kv-format"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(tmp_path, memd, options, message):
    (tmp_path / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
    more = ["--memory", "1GiB", "--page-tokens", "16", *options]
    result = memd("plan", str(tmp_path), *more)
    assert result.exit_code == 2
    said = " ".join(result.stderr.replace("│", " ").split())
    assert "--budget" in said
    assert message in said
