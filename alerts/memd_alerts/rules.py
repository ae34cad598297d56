"""The rule file: conditions on metrics in a small typed form, and what is said when they hold.

The same rules are evaluated here (`memd_alerts.values`, `memd_alerts.evaluate`) and rendered for
Prometheus (`memd_alerts.promql`). docs/alerts.md describes the form.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ValidationError,
    model_validator,
)

RULES_FILE = Path(__file__).with_name("rules.yml")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Severity = Literal["page", "ticket"]
Unit = Literal["number", "ratio", "seconds", "bytes", "per_second"]


class RulesError(Exception):
    """A rule file cannot be read; the message names the rule, the field and what is wrong."""


def _seconds(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"([0-9]+)([smhd])", value)
    if match is None:
        raise ValueError(f"{value!r} is not a duration, such as 5m")
    return int(match[1]) * _UNITS[match[2]]


def _tagged(value: object) -> object:
    """`{rate: {metric: m}}` as `{form: rate, metric: m}`."""
    if isinstance(value, dict) and len(value) == 1:
        ((form, body),) = value.items()
        if isinstance(body, dict):
            return {"form": form, **body}
    return value


Seconds = Annotated[int, BeforeValidator(_seconds), Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Selector(_Part):
    """Some series of one metric, brought together by labels.

    Args:
        metric: Its name.
        where: Values that a label may have; labels left out may have any.
        by: Labels kept; None: the rule's.
    """

    metric: str
    where: dict[str, tuple[str, ...]] = {}
    by: tuple[str, ...] | None = None


class Value(_Selector):
    """The present values, summed."""

    form: Literal["value"]


class Largest(_Selector):
    """The largest of the present values."""

    form: Literal["largest"]


class Rate(_Selector):
    """The growth of counters a second, over a window, summed."""

    form: Literal["rate"]
    over: Seconds


class Increase(_Selector):
    """The growth of counters over a window, summed."""

    form: Literal["increase"]
    over: Seconds


class Age(_Selector):
    """Seconds since the latest of the metric's Unix times."""

    form: Literal["age"]


class Quantile(_Selector):
    """A quantile of what a histogram (`metric`, without _bucket) counted over a window."""

    form: Literal["quantile"]
    q: Annotated[float, Field(gt=0, lt=1)]
    over: Seconds


class Ratio(_Part):
    """One expression divided by another that has the same labels or fewer."""

    form: Literal["ratio"]
    of: "Expression"
    to: "Expression"


class Record(_Part):
    """A named expression of the file."""

    form: Literal["record"]
    name: str


Selector = Value | Largest | Rate | Increase | Age | Quantile
Expression = Annotated[
    Annotated[Selector | Ratio | Record, Discriminator("form")], BeforeValidator(_tagged)
]


class Scaled(_Part):
    """A limit that is itself measured."""

    of: Expression
    times: float = 1.0


Limit = float | Scaled


class Condition(_Part):
    """An expression above or below a limit."""

    expression: Expression
    above: Limit | None = None
    below: Limit | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if (self.above is None) == (self.below is None):
            raise ValueError("give either above or below")
        return self

    @property
    def limit(self) -> Limit:
        """Whichever is given."""
        limit = self.below if self.above is None else self.above
        assert limit is not None
        return limit


class Rule(Condition):
    """One alert.

    Args:
        name: In CamelCase; also the name of its page among the runbooks.
        group: Rules of one concern.
        severity: `page` wakes somebody, `ticket` can wait for the morning.
        summary: One line; {label} and {value} are replaced.
        clear: The limit at which a firing alert ends; None: the same.
        hold: Seconds for which the condition must hold (`for` in the file).
        guards: Conditions that must hold too (`while` in the file).
        unit: How {value} is written.
        prometheus_only: It tells that memd cannot be seen, which only somebody else can say.
        absent: It holds where the expression has no value at all; only for Prometheus.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)
    name: Annotated[str, Field(pattern=r"^Memd[A-Za-z]+$")]
    group: str
    severity: Severity
    summary: str
    by: tuple[str, ...] = ()
    clear: Limit | None = None
    hold: Seconds = Field(0, alias="for")
    guards: tuple[Condition, ...] = Field((), alias="while")
    unit: Unit = "number"
    prometheus_only: bool = False
    absent: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.absent and not self.prometheus_only:
            raise ValueError("absent needs prometheus_only")
        unknown = set(_named(self.summary)) - {*self.by, "value"}
        if unknown:
            raise ValueError(f"the summary names {', '.join(sorted(unknown))}, which `by` does not")
        if self.clear is not None and isinstance(self.clear, float | int):
            limit = self.limit
            if isinstance(limit, float | int):
                looser = self.clear <= limit if self.above is not None else self.clear >= limit
                if not looser:
                    raise ValueError(f"clear {self.clear:g} is beyond the limit {limit:g}")
        return self

    @property
    def ending(self) -> Condition:
        """The condition that keeps a firing alert firing."""
        if self.clear is None:
            return self
        side = "above" if self.above is not None else "below"
        return Condition.model_validate({"expression": self.expression, side: self.clear})


def _named(summary: str) -> list[str]:
    """What is to be put into a summary; ValueError: its braces say something else."""
    found = []
    for text, name, form, conversion in Formatter().parse(summary):
        if "{" in text or "}" in text:
            raise ValueError("the summary has double braces, which mean something to Prometheus")
        if name is not None and (form or conversion or not name.isidentifier()):
            raise ValueError(f"in the summary, {{{name}...}} is more than the name of a label")
        found += [name] if name is not None else []
    return found


class Recording(_Part):
    """An expression with a name, computed once for all who use it."""

    name: str
    by: tuple[str, ...] = ()
    expression: Expression


class RuleFile(_Part):
    """The whole file."""

    records: tuple[Recording, ...] = ()
    rules: tuple[Rule, ...]

    @model_validator(mode="after")
    def _names(self) -> Self:
        for names in ([each.name for each in self.records], [each.name for each in self.rules]):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"named twice: {', '.join(twice)}")
        known = {each.name for each in self.records}
        used = {each.name for each in self._expressions() if isinstance(each, Record)}
        if used - known:
            raise ValueError(f"no such record: {', '.join(sorted(used - known))}")
        nested = [each for part in self.records for each in _parts(part.expression)]
        if any(isinstance(each, Record) for each in nested):
            raise ValueError("a record cannot be made of records")
        return self

    def record(self, name: str) -> Recording:
        """The recording of that name."""
        return next(each for each in self.records if each.name == name)

    def rule(self, name: str) -> Rule | None:
        """The rule of that name."""
        return next((each for each in self.rules if each.name == name), None)

    def selectors(self) -> Iterator[Selector]:
        """Every use of a metric that the built-in evaluation needs; records included."""
        for part in self.records:
            yield from _selectors(_parts(part.expression))
        yield from _selectors(self._expressions(built_in=True))

    def _expressions(self, built_in: bool = False) -> Iterator[Expression]:
        for rule in self.rules:
            if built_in and rule.prometheus_only:
                continue
            for condition in (rule, rule.ending, *rule.guards):
                yield from _parts(condition.expression)
                if isinstance(condition.limit, Scaled):
                    yield from _parts(condition.limit.of)


def _parts(expression: Expression) -> Iterator[Expression]:
    yield expression
    if isinstance(expression, Ratio):
        yield from _parts(expression.of)
        yield from _parts(expression.to)


def _selectors(parts: Iterator[Expression]) -> Iterator[Selector]:
    return (each for each in parts if not isinstance(each, Ratio | Record))


def load_rules(path: Path = RULES_FILE) -> RuleFile:
    """Read a rule file.

    Raises:
        RulesError: it cannot be read, or something in it is wrong.
    """
    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return RuleFile.model_validate(data)
    except (OSError, UnicodeError) as error:
        raise RulesError(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        raise RulesError(f"{path} is not YAML: {error}") from None
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"])) or "the file"
        raise RulesError(f"{path}: {place}: {fault['msg']}") from None


@lru_cache(maxsize=1)
def shipped_rules() -> RuleFile:
    """The rules that come with memd."""
    return load_rules()
