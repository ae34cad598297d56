"""A model that does not fit the device."""

import pytest
import torch
from tiny import write_model

from memd.config import dump
from memd.config_sources import load
from memd.engine import build
from memd.engine.messages import Start
from memd.engine.port import InlinePort
from memd.errors import OutOfDeviceMemory


def test_c108_the_message_has_the_numbers_and_what_to_change(tmp_path, monkeypatch):
    model = write_model(tmp_path / "tiny")
    size_bytes = (model / "model.safetensors").stat().st_size

    def refused(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    monkeypatch.setattr(build, "load_tensors", refused)  # as torch's allocator does
    settings = load(assignments=[f"model.path={model}", "engine.device=cpu"], environment={})
    for _ in range(3):
        with pytest.raises(OutOfDeviceMemory) as caught:
            build.load_engine(InlinePort(), Start(dump(settings), 1, 258, [257]))
        text = str(caught.value)
        assert f"its files have {size_bytes / 1024:.1f} KiB, cpu had " in text
        assert " free of " in text
        assert "model.path" in text
