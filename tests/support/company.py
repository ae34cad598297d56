"""Case C072: twenty prompts alone and together, over a small model in half precision."""

from pathlib import Path
from typing import Any

import tiny

from memd.config import dump
from memd.config_sources import load
from memd.engine.build import load_engine
from memd.engine.messages import Preempt, SamplingParams, Start, StepReport, Submit
from memd.engine.port import InlinePort


class Inline:
    """An engine in this process; texts by request."""

    def __init__(self, model: Path, *settings: str) -> None:
        self.port = InlinePort()
        given = [f"model.path={model}", "engine.threads=1", "memory.page_tokens=16", *settings]
        tree = dump(load(assignments=given, environment={}))
        self.engine, _ = load_engine(self.port, Start(tree, 1, tiny.VOCABULARY, []))
        self.texts: dict[str, list[int]] = {}

    def run(self, prompts: dict[str, list[int]], preempt: bool = False, **more: Any) -> None:
        for serial, (name, prompt) in enumerate(prompts.items()):
            sampling = SamplingParams(
                **{"max_tokens": 64, "seed": serial, "temperature": 0.0, **more}
            )
            self.port.post(Submit(name, prompt, sampling))
            self.texts[name] = []
        for step in range(20_000):
            if preempt and step % 15 == 14:
                self.port.post(*(Preempt(10_000 + step, name) for name in prompts))
            self.engine.step()
            for message in self.port.take():
                if isinstance(message, StepReport):
                    for output in message.outputs:
                        self.texts[output.request_id] += output.token_ids
            if not self.engine.busy:
                return
        raise AssertionError("still busy")


PROMPTS = {str(n): [(7 * n + i * i) % 256 for i in range(20 + n)] for n in range(20)}


def alone(inline: Inline, **more: Any) -> dict[str, list[int]]:
    for serial, (name, prompt) in enumerate(PROMPTS.items()):
        inline.run({name: prompt}, **{"seed": serial, **more})
    return dict(inline.texts)
