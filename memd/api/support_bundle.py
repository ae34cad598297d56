"""Everything that helps somebody else understand a daemon, as one archive without secrets or text.

It is mostly the answers of the admin API, as they are. What cannot be had, because the engine hangs
or the database is gone, is left out and told in the manifest: a bundle is made when things are bad.
"""

import asyncio
import io
import json
import os
import platform
import tarfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import distributions
from typing import Any

import httpx2
import msgspec
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from memd import __version__
from memd.api.auth import Caller, author_of
from memd.api.errors import ApiError
from memd.api.service import Service
from memd.doctor import examine_machine
from memd.scrub import Scrubber, known_secrets
from memd.stacks import tasks_text, threads_text

PART_SECONDS = 15.0  # one part may take, longer than any of its own limits
_ADMIN = "/admin/v1"
ANSWERS = {
    "status": f"{_ADMIN}/status",
    "settings": f"{_ADMIN}/settings",
    "settings-history": f"{_ADMIN}/settings/history?limit=200&measured=true",
    "settings-diff": f"{_ADMIN}/settings/diff",
    "pool": f"{_ADMIN}/pool",
    "requests": f"{_ADMIN}/requests",
    "finished-requests": f"{_ADMIN}/history/requests?limit=500",
    "prefixes": f"{_ADMIN}/prefixes?limit=200",
    "tenants": f"{_ADMIN}/tenants",
    "gpus": f"{_ADMIN}/gpus",
    "events": f"{_ADMIN}/events?limit=1000",
    "alerts": f"{_ADMIN}/alerts",
    "alert-rules": f"{_ADMIN}/alerts/rules",
    "alert-incidents": f"{_ADMIN}/alerts/incidents?limit=500",
    "alert-silences": f"{_ADMIN}/alerts/silences",
    "alert-channels": f"{_ADMIN}/alerts/channels",
    "jobs": f"{_ADMIN}/jobs",
}
# Ids that clients made up may say anything.
_CLIENTS_OWN = ("client_id",)


def bundle_routes(service: Service) -> APIRouter:
    """The route that gives the archive."""
    router = APIRouter()
    content = {"application/gzip": {"schema": {"type": "string", "format": "binary"}}}
    making = asyncio.Lock()

    @router.get("/support-bundle", response_class=Response, responses={200: {"content": content}})
    async def support_bundle(request: Request) -> Response:
        if making.locked():
            raise ApiError(503, "another bundle is being made; it takes some seconds", "busy")
        async with making:
            caller = request.state.caller
            files, problems = await _collected(service, request.app, caller)
            scrubber = Scrubber(await asyncio.to_thread(known_secrets, service.live.current))
            name = f"memd-support-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
            packed = await asyncio.to_thread(_packed, name, files, problems, scrubber)
        who = author_of(caller, None)
        service.store.add_event("support_bundle", f"support bundle for {who}", {"who": who})
        headers = {"content-disposition": f'attachment; filename="{name}.tar.gz"'}
        return Response(packed, media_type="application/gzip", headers=headers)

    return router


async def _collected(
    service: Service, app: FastAPI, caller: Caller
) -> tuple[dict[str, str], dict[str, str]]:
    """Texts of the files by name, and what could not be had, by name and why."""
    threads = asyncio.to_thread
    parts = {
        "metrics.txt": threads(_metrics, service),
        "stacks-api.txt": threads(threads_text),
        "stacks-engine.txt": threads(service.read_engine_stacks),
        "doctor.json": threads(_doctor, service),
        "versions.json": threads(_versions),
        **{f"{name}.json": _answer(app, caller, path) for name, path in ANSWERS.items()},
    }
    snapshot = service.engine.snapshot
    files = {
        "log.txt": service.log_tail.text,
        "stacks-tasks.txt": tasks_text(),
        "snapshot.json": _json(msgspec.to_builtins(snapshot)),
    }
    problems = {}
    found = await asyncio.gather(
        *(asyncio.wait_for(part, PART_SECONDS) for part in parts.values()), return_exceptions=True
    )
    for name, text in zip(parts, found, strict=True):
        if isinstance(text, str):
            files[name] = text
        elif isinstance(text, Exception):
            problems[name] = str(text) or type(text).__name__
        else:
            raise text
    return files, problems


async def _answer(app: ASGIApp, caller: Caller, path: str) -> str:
    """The answer of a route, asked inside the process. Raises ApiError unless it is 200."""

    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] = {"caller": caller, "request_id": "support-bundle"}
        await app(scope, receive, send)

    transport = httpx2.ASGITransport(app=inside)
    async with httpx2.AsyncClient(transport=transport, base_url="http://memd") as http:
        response = await http.get(path)
    if response.status_code != 200:
        raise ApiError(response.status_code, response.text[:500], "refused")
    return _json(_without_clients_own(response.json()))


def _without_clients_own(data: Any) -> Any:
    match data:
        case dict():
            return {
                key: _without_clients_own(each)
                for key, each in data.items()
                if key not in _CLIENTS_OWN
            }
        case list():
            return [_without_clients_own(each) for each in data]
        case _:
            return data


def _metrics(service: Service) -> str:
    return service.metrics.render("text/plain")[0].decode()


def _doctor(service: Service) -> str:
    return _json([asdict(check) for check in examine_machine(service.live.current)])


def _versions() -> str:
    packages = {each.metadata["Name"]: each.version for each in distributions()}
    return _json(
        {
            "memd": __version__,
            "python": platform.python_version(),
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
        }
    )


def _json(data: Any) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _packed(
    name: str, files: Mapping[str, str], problems: Mapping[str, str], scrubber: Scrubber
) -> bytes:
    """The archive: a folder of that name with the files, and a manifest."""
    manifest = {
        "memd": __version__,
        "created_at": time.time(),
        "files": sorted(files),
        "problems": dict(problems),
    }
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for file, text in {"manifest.json": _json(manifest), **files}.items():
            data = scrubber.clean(text).encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"{name}/{file}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()
