"""Stands: a daemon's HTTP side with a scripted engine."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from http_stand import Stand, byte_tokenizer, say

from memd.config import build
from memd.models.tokenizer import Tokenizer


@pytest.fixture
def make_stand(tmp_path: Path) -> Iterator[Callable[..., Stand]]:
    """Starts stands; they end with the test."""
    with contextlib.ExitStack() as stack:

        def make(
            tokenizer: Tokenizer | None = None,
            *,
            has_tokenizer: bool = True,
            max_model_len: int = 200,
            capacity_pages: int = 64,
            loaded: bool = True,
            directory: Path = tmp_path,
            settings: dict[str, Any] | None = None,
        ) -> Stand:
            if has_tokenizer and tokenizer is None:
                tokenizer = byte_tokenizer()
            stand = Stand(
                directory, build(settings or {}), tokenizer, max_model_len, capacity_pages, loaded
            )
            return stack.enter_context(stand)

        yield make


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """One stand for a module's tests; they may change its script."""
    directory = tmp_path_factory.mktemp("stand")
    with Stand(directory, build({}), byte_tokenizer(), 200, 64, True) as running:
        yield running


@pytest.fixture(autouse=True)
def _usual_script(request: pytest.FixtureRequest) -> None:
    if "stand" in request.fixturenames:
        request.getfixturevalue("stand").engine.script = say("Hello!")
