"""What is kept of each request for text after its end: numbers and names, never text."""

import time
from typing import Any

from memd.api.answer import Answer
from memd.api.auth import LOCAL
from memd.api.service import Service


class RequestLog:
    """Adds a row to the history for each request to an endpoint that generates.

    Requests without a valid key are only counted: whoever has none shall not fill the database.

    Args:
        service: Its store takes the rows.
    """

    def __init__(self, service: Service) -> None:
        self._model = service.name
        self._store = service.store

    def add(self, endpoint: str, outcome: str, took_seconds: float, state: dict[str, Any]) -> None:
        """Keep one that has ended.

        Args:
            endpoint: Of the metric `memd_requests_total`.
            outcome: Likewise.
            took_seconds: From its arrival.
            state: Of the HTTP request; `answer` is there once it has been prepared.
        """
        if outcome == "unauthorized":
            return
        now = time.time()
        answer: Answer | None = state.get("answer")
        row = {
            "time": now,
            "received_at": now - took_seconds,
            "request_id": state["request_id"],
            "client_id": state["client_id"],
            "tenant": state.get("caller", LOCAL).tenant,
            "endpoint": endpoint,
            "model": self._model,
            "outcome": outcome,
            "duration_seconds": took_seconds,
        }
        self._store.add_rows("requests", (row if answer is None else {**row, **answer.record()},))
