"""What is wrong with a value is told in memd's words, whoever found it."""

import pytest
from pydantic import BaseModel, Field, ValidationError

from memd.errors import requirement


class Form(BaseModel):
    number: int = Field(1, ge=1, le=9)
    share: float = Field(0.5, gt=0, lt=1)
    word: str = Field("a", pattern="^[a-z]$")
    flag: bool = True
    part: "Form | None" = None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"number": 0}, "must be at least 1"),
        ({"number": 10}, "must be at most 9"),
        ({"number": "many"}, "must be a whole number"),
        ({"number": 1.5}, "must be a whole number"),
        ({"share": 0}, "must be greater than 0"),
        ({"share": "half"}, "must be a valid number"),
        ({"word": "A"}, "must match pattern '^[a-z]$'"),
        ({"part": []}, "must be an object"),
        ({"flag": "perhaps"}, "must be a valid boolean"),
    ],
)
def test_what_is_wrong_is_told_as_what_must_be(given, told):
    with pytest.raises(ValidationError) as refused:
        Form(**given)
    (fault,) = refused.value.errors()
    assert requirement(fault["msg"]) == told


def test_what_memd_says_itself_stays():
    assert requirement("Value error, '4GBB' needs a unit") == "'4GBB' needs a unit"
