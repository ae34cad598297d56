"""Bodies of the settings routes. A misspelt field is refused: it might have been the safety net."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from memd.api.schemas import INT64_MAX, refuse

MAX_REVERT_SECONDS = 7 * 86400
RevisionNumber = Annotated[int, Field(ge=-INT64_MAX, le=INT64_MAX)]
Key = Annotated[str, Field(min_length=1, max_length=200)]
# PostgreSQL keeps no U+0000.
Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00]*$")]
Reason = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\x00]*$")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Authored(_Body):
    who: Name | None = None
    source: Annotated[
        Literal["api", "cli", "dashboard"], Field(description="What the author uses")
    ] = "api"


class _Changes(_Body):
    changes: dict[str, Any] = Field({}, description="Dotted key: value")
    reset: Annotated[
        list[Key],
        Field(max_length=100, description="Keys whose live values give way to the sources' again"),
    ] = []
    persist: bool = Field(False, description="Keep the values over a restart")

    @model_validator(mode="after")
    def _something(self) -> "_Changes":
        if not self.changes and not self.reset:
            refuse("changes", "changes is empty, and there is nothing to reset")
        return self


class SettingsChange(_Changes, _Authored):
    """Body of PATCH /admin/v1/settings."""

    revision: RevisionNumber = Field(description="The revision the change was made against")
    reason: Reason
    revert_after_seconds: (
        Annotated[
            float,
            Field(ge=1, le=MAX_REVERT_SECONDS, description="Taken back then, unless confirmed"),
        ]
        | None
    ) = None


class SettingsPreview(_Changes):
    """Body of POST /admin/v1/settings/preview."""


class SettingsUndo(_Authored):
    """Body of POST /admin/v1/settings/undo."""

    reason: Reason
    revision: (
        Annotated[RevisionNumber, Field(description="Default: the latest change in effect")] | None
    ) = None


class SettingsConfirm(_Authored):
    """Body of POST /admin/v1/settings/confirm."""

    revision: RevisionNumber = Field(description="The revision that waits to be confirmed")


class SettingsReload(_Authored):
    """Body of POST /admin/v1/settings/reload, which may be left out."""

    reason: Reason = "reload"


SETTINGS_SCHEMAS = (
    SettingsChange,
    SettingsPreview,
    SettingsUndo,
    SettingsConfirm,
    SettingsReload,
)
