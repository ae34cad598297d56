"""A plan file of shared heads: read as it was written, and refused with the field at fault."""

import base64
import json
import struct
from pathlib import Path

import pytest

from memd.errors import ModelError
from memd.models.head_plan import HeadPlan, read_plan, weights_digest, write_plan
from memd.models.hub import ModelFiles

VALUES, KEYS = struct.pack("<8f", *range(8)), struct.pack("<4f", *range(4))
PLAN = HeadPlan("m", "w", 3, 2, 1, (((0, 2), (1,)),), (VALUES,), (KEYS,), {"perplexity": 1.5})


def test_a_plan_is_read_as_it_was_written(tmp_path: Path):
    write_plan(PLAN, tmp_path / "heads.json")
    assert read_plan(tmp_path / "heads.json") == PLAN
    assert (PLAN.kv_heads, PLAN.largest) == (2, 2)


def coded(*numbers: float) -> list[str]:
    return [base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "x"}, "no plan of shared heads"),
        ({"version": 2}, "version is 2, this memd reads 1"),
        ({"weights": 7}, "weights is 7, must be text"),
        ({"kv_heads_before": True}, "kv_heads_before is True, must be a number from 1"),
        ({"head_dim": 0}, "head_dim is 0, must be a number from 1"),
        ({"key_pairs": 2}, "key_pairs is 2, must be at most half of head_dim, 2"),
        ({"clusters": []}, "clusters must be a list with an entry for each layer"),
        ({"clusters": [[[0, 2], [0]]]}, "clusters[0] is [[0, 2], [0]], must hold each head"),
        ({"clusters": [[[0, 1, 2], []]]}, "clusters[0] has an empty cluster"),
        ({"clusters": [[[0, 1, 2]]]}, "all layers must have as many"),
        ({"values": coded(1, 2)}, "values[0] has 8 bytes, must have 32"),
        ({"keys": ["%"]}, "keys[0] is not base64"),
        ({"keys": coded(1, 2, 3, float("nan"))}, "keys[0] has numbers that are not finite"),
        ({"keys": []}, "keys must be a list with an entry for each of 1 layers"),
        ({"measured": []}, "measured is list, must be an object"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change, said):
    path = tmp_path / "heads.json"
    write_plan(PLAN, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError) as caught:
        read_plan(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


def test_what_is_no_json_is_refused(tmp_path: Path):
    path = tmp_path / "heads.json"
    path.write_bytes(b"\x80\x04")
    with pytest.raises(ModelError, match="it is not JSON"):
        read_plan(path)


def test_weights_are_known_wherever_they_lie_and_others_are_not(tmp_path: Path):
    digests = []
    for name, content in (("a", b"x" * 9999), ("b", b"x" * 9999), ("c", b"x" * 9998 + b"y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
        digests.append(weights_digest(ModelFiles(name, directory=tmp_path / name)))
    assert digests[0] == digests[1] != digests[2]
