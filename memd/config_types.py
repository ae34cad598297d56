"""Types that settings are made of, shared by the sections of the tree."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic.config import JsonDict

from memd.units import parse_duration, parse_share, parse_size

Share = Annotated[float, BeforeValidator(parse_share)]
SizeBytes = Annotated[int, BeforeValidator(parse_size)]
DurationSeconds = Annotated[float, BeforeValidator(parse_duration)]
Auto = Literal["auto"]
LIVE: JsonDict = {"live": True}


class Section(BaseModel):
    """A part of the settings tree: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
