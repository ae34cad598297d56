"""Steps as graphs compute them, with padded rows and tokens, give the text of eager passes.

What a graph replays is called directly here; all else, from the layout of its inputs on, is the
same.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny
import torch

from memd.config import dump
from memd.config_sources import load
from memd.engine.build import load_engine
from memd.engine.graphs import (
    MAX_GROUPS,
    PrefillShape,
    batch_sizes,
    decode_layout,
    prefill_inputs,
    prefill_layout,
)
from memd.engine.messages import SamplingParams, Start, StepReport, Submit
from memd.engine.plan import StepPlan
from memd.engine.port import InlinePort
from memd.engine.prefix_groups import PrefixGroup
from memd.engine.runner import Runner
from memd.pool.audit import check

MAX_SEQUENCES = 20


class CalledDecodes:
    """Stands for `DecodeGraphs`: pads to its sizes and calls the step."""

    max_batch = MAX_SEQUENCES

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.rows: list[tuple[int, int]] = []  # used, with padding

    def takes_groups(self, count: int) -> bool:
        return count > 1

    def run(
        self, slots: Sequence[int], kv_lens: Sequence[int], groups: Sequence[PrefixGroup]
    ) -> torch.Tensor:
        padding = self._runner._slots.padding
        layout = torch.from_numpy(decode_layout(slots, kv_lens, groups, MAX_SEQUENCES, padding))
        all_slots, all_lens, shared = layout.split((MAX_SEQUENCES, MAX_SEQUENCES, 3 * MAX_GROUPS))
        size = next(size for size in batch_sizes(MAX_SEQUENCES) if size >= len(slots))
        self.rows.append((len(slots), size))
        return self._runner._decode(
            all_slots[:size], all_lens[:size], shared.view(-1, 3) if groups else None
        )[:, : len(slots)]


class CalledPrefills:
    """Stands for `PrefillGraphs`: one shape for all."""

    def __init__(self, runner: Runner, shape: PrefillShape) -> None:
        self._runner = runner
        self._shape = shape
        self.plans: list[PrefillShape] = []  # what they took

    def fitting(self, taken: PrefillShape) -> PrefillShape | None:
        return self._shape if self._shape.holds(taken) else None

    def run(self, shape: PrefillShape, plan: StepPlan) -> torch.Tensor:
        self.plans.append(PrefillShape.of(plan))
        layout = torch.from_numpy(prefill_layout(plan, shape, self._runner._slots.padding))
        inputs = prefill_inputs(layout, shape)
        return self._runner._prefill(inputs, True)[:, : len(plan.sampled)]


class Serving:
    """An inline engine on the tiny model; with `padded`, its steps are those of graphs."""

    def __init__(self, model: Path, padded: bool) -> None:
        self._port = InlinePort()
        tree = load(
            assignments=[
                f"model.path={model}",
                f"engine.max_sequences={MAX_SEQUENCES}",
                "engine.max_batch_tokens=96",
                "engine.threads=1",
                "memory.limit=4096 tokens",
                "memory.host.limit=0",
            ],
            environment={},
        )
        start = Start(dump(tree), 1, tiny.VOCABULARY, [tiny.END])
        self.engine, _ = load_engine(self._port, start)
        runner = self.engine._runner
        assert isinstance(runner, Runner)
        if padded:
            runner.steps_ahead = 1
            self.decodes = CalledDecodes(runner)
            self.prefills = CalledPrefills(runner, PrefillShape(128, 0, 8, 8))
            self.mixed = CalledPrefills(runner, PrefillShape(100, 12, 8, 14))
            runner._decode_graphs = self.decodes  # type: ignore[assignment]
            runner._prefill_graphs = {False: self.prefills}  # type: ignore[dict-item]
            runner._mixed_graphs = {False: self.mixed}  # type: ignore[dict-item]

    def run(self, work: list[tuple[list[int], SamplingParams]]) -> dict[str, list[int]]:
        texts: dict[str, list[int]] = {}
        for index, (prompt, sampling) in enumerate(work):
            texts[str(index)] = []
            self._port.post(Submit(str(index), prompt, sampling))
            if index % 3 == 0:
                self._step(texts)
        while self.engine.busy:
            self._step(texts)
        assert check(self.engine.pool) == []
        return texts

    def _step(self, texts: dict[str, list[int]]) -> None:
        self.engine.step()
        for message in self._port.take():
            for output in message.outputs if isinstance(message, StepReport) else ():
                texts[output.request_id] += output.token_ids


@pytest.mark.parametrize("penalties", [False, True])
def test_texts_are_those_of_eager_passes(tmp_path: Path, penalties: bool) -> None:
    rng = random.Random(1)
    shared = [rng.randrange(256) for _ in range(200)]
    kinds: list[dict[str, float]] = [
        {"temperature": 0.0},
        {"temperature": 1.2, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 12},
        {"temperature": 1.0, "frequency_penalty": 0.6},
    ]
    work = []
    for index in range(30):
        prompt = shared[: rng.choice([0, 37, 200])] + rng.choices(
            range(256), k=rng.randrange(1, 90)
        )
        sampling = SamplingParams(
            index,
            rng.randrange(1, 40),
            ignore_eos=rng.random() < 0.5,
            **kinds[index % (4 if penalties else 3)],
        )
        work.append((prompt, sampling))
    model = tiny.write_model(tmp_path / "tiny", num_layers=2)
    padded = Serving(model, padded=True)
    assert padded.run(work) == Serving(model, padded=False).run(work)
    if not penalties:  # a step with a request that the host has to sample for is an eager pass
        assert any(used < size for used, size in padded.decodes.rows)
        assert max(plan.chunks for plan in padded.prefills.plans) > 1
        mixed = padded.mixed.plans
        assert max(plan.decodes for plan in mixed) > 1 < max(plan.chunks for plan in mixed)
        assert any(plan.sampled < plan.decodes + plan.chunks for plan in mixed)
