"""Who may do what: API keys before every route, except health.

Without a keys file everybody may do everything; the daemon then listens on loopback or on a socket
with file permissions only (see memd.config).
"""

import time
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from memd.api.errors import ApiError, error_response
from memd.keys import ApiKey, KeysFile, find_key
from memd.keys import Scope as KeyScope

OPEN_PATHS = ("/health", "/health/live", "/health/ready")
_ANY_KEY = ("/version", "/openapi.json")
_MAX_KEY_BYTES = 256


@dataclass(frozen=True)
class Caller:
    """Whoever sends a request.

    Args:
        name: Of the key; recorded with changes. None: there are no keys.
        tenant: Keeps caches apart and shares the engine fairly; "" where there are no keys.
        priority: Lowest and highest allowed; None: any.
        scopes: Of the key; None: everything is allowed.
    """

    name: str | None = None
    tenant: str = ""
    priority: tuple[int, int] | None = None
    scopes: tuple[str, ...] | None = None

    def salt(self, cache_salt: str | None) -> str:
        """The cache namespace of a request. Neither part can hold U+0000, so no two pairs meet."""
        return f"{self.tenant}\0{cache_salt or ''}" if self.tenant else cache_salt or ""


LOCAL = Caller()


def author_of(caller: Caller, said: str | None) -> str:
    """Who changes something: the key's name, which cannot be made up, else what the caller says."""
    return caller.name or said or "local"


def needed_scope(method: str, path: str) -> KeyScope | None:
    """The scope a route asks for; None: any key will do. Unknown paths count as inference."""
    if path in _ANY_KEY:
        return None
    if path == "/metrics":
        return "metrics"
    if path.startswith("/admin/"):
        return "admin:read" if method in ("GET", "HEAD") else "admin:write"
    return "inference"


class Authentication:
    """ASGI middleware: puts `caller` into the request's state, or answers 401 or 403.

    Args:
        app: The application.
        keys: The keys in force; None: everybody is let in.
    """

    def __init__(self, app: ASGIApp, keys: KeysFile | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        caller = LOCAL
        if self._keys is not None and scope["path"] not in OPEN_PATHS:
            try:
                caller = self._authorised(self._keys, scope)
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        scope["state"]["caller"] = caller
        await self._app(scope, receive, send)

    def _authorised(self, keys: KeysFile, scope: Scope) -> Caller:
        """Whose key it is. Raises ApiError 401 or 403."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        key = find_key(keys.current(), _bearer(given))
        if key is None:
            raise _unauthorized("the API key is not valid here")
        if key.expired(time.time()):
            raise _unauthorized(f"the API key {key.name} has expired")
        needed = needed_scope(scope["method"], scope["path"])
        if needed is not None and needed not in key.scopes:
            raise ApiError(
                403,
                f"the API key {key.name} has the scopes {', '.join(key.scopes)}; this needs "
                f"{needed}",
                "insufficient_scope",
            )
        return caller_of(key)


def caller_of(key: ApiKey) -> Caller:
    """Whoever uses a key."""
    return Caller(key.name, key.tenant, key.priority, tuple(key.scopes))


def _bearer(values: list[bytes]) -> str:
    """The key in the `Authorization` header. Raises ApiError 401."""
    if not values:
        raise _unauthorized("an API key is needed: send Authorization: Bearer KEY")
    kind, _, text = values[0].partition(b" ")
    if len(values) > 1 or kind.lower() != b"bearer" or len(text) > _MAX_KEY_BYTES:
        raise _unauthorized("the Authorization header must be one: Bearer KEY")
    return text.strip().decode("latin-1")


def _unauthorized(message: str) -> ApiError:
    headers = {"www-authenticate": 'Bearer realm="memd"'}
    return ApiError(401, message, "invalid_api_key", headers=headers)
