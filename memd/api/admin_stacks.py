"""What the daemon's threads and tasks do now, to the log: for when something seems stuck."""

import os

from fastapi import APIRouter
from starlette.responses import Response

from memd.api.body import json_response
from memd.api.service import Service


def stacks_routes(service: Service) -> APIRouter:
    """The route under /debug/stacks."""
    router = APIRouter(prefix="/debug/stacks")

    @router.post("")
    async def write() -> Response:
        service.write_stacks()
        ready = service.engine.ready
        pids = {"api": os.getpid(), "engine": ready.pid if ready else None}
        return json_response({"written_to": "the daemon's log", "pids": pids})

    return router
