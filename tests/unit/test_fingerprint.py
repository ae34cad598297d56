"""What tells one set of weights from another under the same name (case C026)."""

import os
from pathlib import Path

import toy

from memd.engine.build import fingerprint
from memd.models.hub import ModelFiles


def test_other_weights_have_another_fingerprint(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    files = ModelFiles("model", directory=tmp_path)
    first = fingerprint(files, toy.CONFIG)
    assert fingerprint(files, toy.CONFIG) == first
    weights.write_bytes(b"two")
    os.utime(weights, (1, 1))
    assert fingerprint(files, toy.CONFIG) != first
