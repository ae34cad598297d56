"""A client of a running memd: the admin API, and the OpenAI API with streaming.

The command line and the dashboard go through it; neither speaks HTTP itself. Answers are the
daemon's JSON as it came. Not thread-safe; one client a thread.
"""

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx2

from memd.connection import JSON, ClientError, Connection, Unreachable, checked, error_of, json_of

__all__ = ["DEFAULT_URL", "JSON", "Client", "ClientError", "Unreachable"]

DEFAULT_URL = "http://127.0.0.1:8733"


class Client:
    """Calls one daemon. Use as a context manager, or call `close`.

    Proxies named by the environment are not used: the daemon is on this machine or on its network.

    Args:
        base_url: Such as `http://127.0.0.1:8733` or `unix:///run/memd.sock`.
        api_key: Where the daemon asks for one.
        transport: How bytes get there; default: as `base_url` says.
        timeout_seconds: Longest silence of the daemon, except while it generates.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        api_key: str | None = None,
        transport: httpx2.BaseTransport | None = None,
        timeout_seconds: float = 30.0,
    ) -> None:
        self._connection = Connection(base_url, api_key, transport, timeout_seconds)
        self.base_url = self._connection.base_url
        self._call = self._connection.call
        self._request = self._connection.request
        self._stream = self._connection.stream
        self._download = self._connection.download

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connections."""
        self._connection.close()

    def version(self) -> JSON:
        """Name and version of whatever listens; the way to tell that it is memd."""
        return self._call("GET", "/version")

    def readiness(self) -> JSON:
        """`status` and, while loading, `stage` and `progress`. Not being ready is no error here."""
        response = self._request("GET", "/health/ready")
        return json_of(response) if response.status_code == 503 else checked(response)

    def status(self) -> JSON:
        """State, model, settings revision and a summary of requests and pool."""
        return self._call("GET", "/admin/v1/status")

    def pool(self) -> JSON:
        """Layout and counts of the pool."""
        return self._call("GET", "/admin/v1/pool")

    def blocks(self, offset: int = 0, limit: int = 10_000, at: float | None = None) -> JSON:
        """What each block holds, or held `at` some time, in `columns`, and the `total` of them."""
        query = {"offset": offset, "limit": limit, "at": at}
        return self._call("GET", "/admin/v1/pool/blocks", query=query)

    def all_blocks(self, at: float | None = None) -> JSON:
        """The same of all blocks, in as many calls as that takes."""
        answer = self.blocks(at=at)
        columns = answer["columns"]
        while (have := len(columns["block"])) < answer["total"]:
            more = self.blocks(offset=have, at=at)
            if not more["columns"]["block"]:
                break  # the pool has shrunk meanwhile
            answer["tenants"] = more["tenants"]
            for name, column in columns.items():
                column.extend(more["columns"][name])
        return answer

    def pool_maps(self) -> JSON:
        """The `times` for which `blocks` can be asked, ascending, and how often they are kept."""
        return self._call("GET", "/admin/v1/pool/maps")

    def prefixes(self, limit: int = 100, **filters: Any) -> JSON:
        """The cached prefixes, by `sort`, `tenant`, `pinned`."""
        return self._call("GET", "/admin/v1/prefixes", query={"limit": limit, **filters})

    def explain_prefix(self, prompt: str | None = None, **more: Any) -> JSON:
        """What a prompt (or `tokens`, or `request_id`) would find; `tenant`, `cache_salt`."""
        body = {"prompt": prompt, **more} if prompt is not None else more
        return self._call("POST", "/admin/v1/prefixes/explain", body)

    def pin(self, prefix_id: str, ttl_seconds: float | None, reason: str, **more: Any) -> JSON:
        """Keep a prefix from eviction, for a time or until unpinned; `who`.

        Raises:
            ClientError: 404 when it is not cached (any more), 409 over the pin budget.
        """
        body = {"reason": reason, "ttl_seconds": ttl_seconds, **more}
        return self._call("POST", f"/admin/v1/prefixes/{quote(prefix_id, safe='')}/pin", body)

    def unpin(self, prefix_id: str, reason: str, **more: Any) -> JSON:
        """End the pins of a prefix; `who`."""
        body = {"reason": reason, **more}
        return self._call("POST", f"/admin/v1/prefixes/{quote(prefix_id, safe='')}/unpin", body)

    def evict_prefix(self, prefix_id: str, reason: str, **more: Any) -> JSON:
        """Forget a prefix and what follows it, as far as it is not held or pinned; `who`."""
        body = {"reason": reason, **more}
        return self._call("POST", f"/admin/v1/prefixes/{quote(prefix_id, safe='')}/evict", body)

    def tenants(self) -> JSON:
        """The tenants: what they have and may have."""
        return self._call("GET", "/admin/v1/tenants")

    def set_tenant(self, name: str, reason: str, **more: Any) -> JSON:
        """Set a tenant up, or change it: `quota`, `weight`, `revision`, `persist`, `who`."""
        body = {"reason": reason, **more}
        return self._call("PUT", f"/admin/v1/tenants/{quote(name, safe='')}", body)

    def unset_tenant(self, name: str, reason: str, **more: Any) -> JSON:
        """Take a tenant's quota and weight away; `persist`, `who`."""
        body = {"reason": reason, **more}
        return self._call("DELETE", f"/admin/v1/tenants/{quote(name, safe='')}", body)

    def traces(self, limit: int = 100) -> JSON:
        """Recorded traces, newest first, and which one is recording."""
        return self._call("GET", "/admin/v1/traces", query={"limit": limit})

    def start_trace(self, reason: str, **more: Any) -> JSON:
        """Begin a recording: `tenant_names`, `who`. Raises ClientError 409 when one goes on."""
        return self._call("POST", "/admin/v1/traces/start", {"reason": reason, **more})

    def stop_trace(self, reason: str, **more: Any) -> JSON:
        """End the recording: `who`. Raises ClientError 409 when none goes on."""
        return self._call("POST", "/admin/v1/traces/stop", {"reason": reason, **more})

    def export_trace(self, trace_id: str) -> Iterator[bytes]:
        """A trace as JSON lines, piece by piece. Raises ClientError 404, Unreachable."""
        return self._download(f"/admin/v1/traces/{quote(trace_id, safe='')}/export")

    def reclaim(self, pages: int | None = None, reason: str | None = None) -> JSON:
        """Evict that many cached pages, or down to the low mark."""
        body = {} if pages is None else {"pages": pages}
        return self._call("POST", "/admin/v1/pool/reclaim", body, {"reason": reason})

    def flush(self, reason: str | None = None) -> JSON:
        """Evict every cached page."""
        return self._call("POST", "/admin/v1/pool/flush", {}, {"reason": reason})

    def defrag(self, reason: str | None = None) -> JSON:
        """Have pages moved together, so that whole blocks become empty."""
        return self._call("POST", "/admin/v1/pool/defrag", {}, {"reason": reason})

    def audit(self, reason: str | None = None) -> JSON:
        """Recount the pool and repair leaks."""
        return self._call("POST", "/admin/v1/pool/audit", {}, {"reason": reason})

    def requests(self) -> JSON:
        """The open requests."""
        return self._call("GET", "/admin/v1/requests")

    def request(self, request_id: str) -> JSON:
        """One open request."""
        return self._call("GET", f"/admin/v1/requests/{quote(request_id, safe='')}")

    def cancel(self, request_id: str, reason: str | None = None) -> JSON:
        """End a request for its client."""
        path = f"/admin/v1/requests/{quote(request_id, safe='')}"
        return self._call("DELETE", path, query={"reason": reason})

    def preempt(self, request_id: str, reason: str | None = None) -> JSON:
        """Take a running request's memory; it waits, and resumes by itself."""
        path = f"/admin/v1/requests/{quote(request_id, safe='')}/preempt"
        return self._call("POST", path, query={"reason": reason})

    def set_priority(self, request_id: str, priority: int, reason: str | None = None) -> JSON:
        """Move an open request in the order; lower goes first."""
        path = f"/admin/v1/requests/{quote(request_id, safe='')}"
        return self._call("PATCH", path, {"priority": priority, "reason": reason})

    def settings(self) -> JSON:
        """`revision`, the tree as `settings`, `sources` of all and details of `live` keys."""
        return self._call("GET", "/admin/v1/settings")

    def change_settings(
        self, revision: int, reason: str, changes: Mapping[str, Any], **more: Any
    ) -> JSON:
        """Apply changes, all or none, if `revision` is still the current one.

        Args:
            revision: What the changes are based on.
            reason: Recorded, as are `who` and `source`.
            changes: Values by dotted key.
            more: `reset`, keys whose live values are given up; `persist`, over a restart;
                `revert_after_seconds`, unless confirmed; `who`; `source`, cli or dashboard.

        Raises:
            ClientError: 409 when the revision is stale or a change of the same keys waits to be
                confirmed, 400 when a key or value is refused.
        """
        body = {"revision": revision, "reason": reason, "changes": dict(changes), **more}
        return self._call("PATCH", "/admin/v1/settings", body)

    def preview_settings(self, changes: Mapping[str, Any], **more: Any) -> JSON:
        """What changes would do, with `reset` and `persist` as above. Nothing is applied."""
        return self._call("POST", "/admin/v1/settings/preview", {"changes": dict(changes), **more})

    def undo_settings(self, reason: str, **more: Any) -> JSON:
        """Take back a `revision`, or the latest change that is in effect; `who`, `source`."""
        return self._call("POST", "/admin/v1/settings/undo", {"reason": reason, **more})

    def confirm_settings(self, revision: int, **more: Any) -> JSON:
        """Let a change stay that would revert by itself; `who`, `source`."""
        return self._call("POST", "/admin/v1/settings/confirm", {"revision": revision, **more})

    def reload_settings(self, **more: Any) -> JSON:
        """Have the sources read again; what that did to each key. `reason`, `who`, `source`."""
        return self._call("POST", "/admin/v1/settings/reload", more)

    def settings_history(self, **filters: Any) -> JSON:
        """The revisions, oldest first, by key, who, source, kind, since, until, limit; `measured`:
        with figures before and after each.
        """
        return self._call("GET", "/admin/v1/settings/history", query=filters)

    def export_settings(self, form: str = "yaml", everything: bool = False) -> JSON:
        """The settings in force as the `text` of a file, YAML or TOML."""
        query = {"format": form, "everything": str(everything).lower()}
        return self._call("GET", "/admin/v1/settings/export", query=query)

    def settings_diff(self) -> JSON:
        """Where what is in force differs from the file and the other sources as they are now."""
        return self._call("GET", "/admin/v1/settings/diff")

    def faults(self) -> JSON:
        """The faults `armed`, and how often each kind was `injected` in the engine of now."""
        return self._call("GET", "/admin/v1/debug/faults")

    def arm_faults(self, plan: Mapping[str, Any]) -> JSON:
        """Replace the faults that are armed; an empty plan disarms all.

        Raises:
            ClientError: 409 when the daemon runs without `debug.faults`.
        """
        return self._call("PUT", "/admin/v1/debug/faults", plan)

    def metrics(self) -> str:
        """What Prometheus scrapes, in its text format."""
        response = self._request("GET", "/metrics")
        if response.is_error:
            raise error_of(response)
        return response.text

    def samples(
        self, metric: str, since: float, until: float | None = None, step: float | None = None
    ) -> JSON:
        """A metric's kept samples of a time (Unix seconds), one every `step` seconds."""
        query = {"metric": metric, "since": since, "until": until, "step": step}
        return self._call("GET", "/admin/v1/samples", query=query)

    def events(self, kind: str | None = None, since: float | None = None, limit: int = 100) -> JSON:
        """What happened, newest first."""
        return self._call(
            "GET", "/admin/v1/events", query={"kind": kind, "since": since, "limit": limit}
        )

    def finished_requests(
        self,
        since: float | None = None,
        tenant: str | None = None,
        outcome: str | None = None,
        limit: int = 100,
    ) -> JSON:
        """Requests that have ended, newest first; no text."""
        query = {"since": since, "tenant": tenant, "outcome": outcome, "limit": limit}
        return self._call("GET", "/admin/v1/history/requests", query=query)

    def gpus(self) -> JSON:
        """The boards as NVML tells them, or why they are unknown."""
        return self._call("GET", "/admin/v1/gpus")

    def write_stacks(self) -> JSON:
        """Have the daemon write the stacks of its threads and tasks to its log."""
        return self._call("POST", "/admin/v1/debug/stacks")

    def alerts(self) -> JSON:
        """What fires, is pending, or was resolved within 15 minutes; and `evaluated_at`."""
        return self._call("GET", "/admin/v1/alerts")

    def alert_rules(self) -> JSON:
        """Every rule, with the values that it sees now."""
        return self._call("GET", "/admin/v1/alerts/rules")

    def try_rule(
        self,
        name: str,
        threshold: float | None = None,
        for_seconds: int | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> JSON:
        """How often a rule fired, and would have with another limit or hold time."""
        query = {"threshold": threshold, "for_seconds": for_seconds, "since": since, "until": until}
        return self._call(
            "GET", f"/admin/v1/alerts/rules/{quote(name, safe='')}/trial", None, query
        )

    def incidents(self, since: float = 0.0, limit: int = 100) -> JSON:
        """Alerts that fired since then (Unix seconds), newest first."""
        query = {"since": since, "limit": limit}
        return self._call("GET", "/admin/v1/alerts/incidents", query=query)

    def silences(self) -> JSON:
        """The silences in force."""
        return self._call("GET", "/admin/v1/alerts/silences")

    def silence(
        self, matchers: Mapping[str, str], seconds: float, reason: str, author: str | None = None
    ) -> JSON:
        """Have nobody told of alerts whose labels all match, for so long."""
        body = {"matchers": dict(matchers), "seconds": seconds, "reason": reason, "author": author}
        return self._call("POST", "/admin/v1/alerts/silences", body)

    def unsilence(self, silence_id: str) -> JSON:
        """End a silence."""
        return self._call("DELETE", f"/admin/v1/alerts/silences/{quote(silence_id, safe='')}")

    def alert_channels(self) -> JSON:
        """Who is told, and whether it worked."""
        return self._call("GET", "/admin/v1/alerts/channels")

    def test_channel(self, name: str) -> JSON:
        """Send a test message and wait for it; `delivered`, or an `error`."""
        return self._call("POST", f"/admin/v1/alerts/channels/{quote(name, safe='')}/test")

    def jobs(self) -> JSON:
        """The daemon's jobs, their latest runs and the next ones."""
        return self._call("GET", "/admin/v1/jobs")

    def run_job(self, name: str) -> JSON:
        """Run a job now and wait for it. Raises ClientError: 409 when it is at work."""
        return self._call("POST", f"/admin/v1/jobs/{quote(name, safe='')}/run")

    def support_bundle(self) -> bytes:
        """An archive, .tar.gz, of what helps others to understand the daemon."""
        return b"".join(self._download("/admin/v1/support-bundle"))

    def models(self) -> JSON:
        """The served models, as OpenAI lists them."""
        return self._call("GET", "/v1/models")

    def complete(self, body: Mapping[str, Any]) -> JSON:
        """`POST /v1/completions`, answered whole."""
        return self._call("POST", "/v1/completions", {**body, "stream": False}, generates=True)

    def chat(self, body: Mapping[str, Any]) -> JSON:
        """`POST /v1/chat/completions`, answered whole."""
        return self._call("POST", "/v1/chat/completions", {**body, "stream": False}, generates=True)

    def stream_complete(self, body: Mapping[str, Any]) -> Iterator[JSON]:
        """`POST /v1/completions`, chunk by chunk; the last one carries `usage`."""
        return self._stream("/v1/completions", body)

    def stream_chat(self, body: Mapping[str, Any]) -> Iterator[JSON]:
        """`POST /v1/chat/completions`, chunk by chunk; the last one carries `usage`.

        Closing the iterator hangs up, which ends the request in the daemon.
        """
        return self._stream("/v1/chat/completions", body)
