"""The daemon's jobs over HTTP: when they ran and run, and running one now."""

from fastapi import APIRouter
from starlette.responses import Response

from memd.api.body import json_response
from memd.api.errors import ApiError
from memd.api.schemas import answers
from memd.api.service import Service
from memd.jobs import JobRunning, Jobs


def job_routes(service: Service) -> APIRouter:
    """The routes under /jobs."""
    router = APIRouter(prefix="/jobs")

    def started() -> Jobs:
        if service.jobs is None:
            raise ApiError(503, "the daemon is starting", "loading")
        return service.jobs

    @router.get("")
    async def jobs() -> Response:
        return json_response({"jobs": started().describe()})

    @router.post("/{name}/run", responses=answers(404, 409))
    async def run(name: str) -> Response:
        try:
            return json_response(await started().run_now(name))
        except KeyError:
            raise ApiError(404, f"no job is named {name[:60]!r}", "not_found") from None
        except JobRunning as error:
            raise ApiError(409, str(error), "refused") from None

    return router
