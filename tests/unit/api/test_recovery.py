"""What an open sequence keeps, and how the one that kills the engine is found."""

from memd.api.recovery import OpenSequence, Trial
from memd.engine.messages import Output, SamplingParams, Submit


def sequence(name: str = "a-0") -> OpenSequence:
    delivered: list[Output] = []
    opened = OpenSequence(Submit(name, [1], SamplingParams(1, 9)), delivered.append, 0.0)
    opened.hand_over()
    return opened


def test_only_deaths_in_a_row_without_a_token_count():
    each = sequence()
    for deaths in (1, 2):
        each.lose_engine()
        each.hand_over()
        assert each.deaths == deaths
    assert each.suspect
    each.take(Output("a-0", [5]))
    each.lose_engine()
    assert each.deaths == 1
    assert not each.suspect


def test_a_death_counts_only_for_those_that_were_there():
    each = sequence()
    each.lose_engine()
    each.lose_engine()
    assert each.deaths == 1


def test_what_is_handed_over_does_not_change_later():
    each = sequence()
    each.take(Output("a-0", [5]))
    submitted = each.hand_over()
    each.take(Output("a-0", [6]))
    assert submitted.output_tokens == [5]
    assert each.token_ids == [5, 6]


def suspects(*names: str) -> dict[str, OpenSequence]:
    found = {name: sequence(name) for name in names}
    for each in found.values():
        each.lose_engine()
        each.lose_engine()
    return found


def test_suspects_come_one_after_the_other():
    there = suspects("a-0", "b-0")
    first, second = there.values()
    trial = Trial(there.values())
    assert trial.next(there, blocked=False) is first
    assert trial.next(there, blocked=False) is None
    assert not trial.over
    first.take(Output("a-0", [1]))
    assert trial.next(there, blocked=False) is second
    second.take(Output("b-0", [1]))
    assert trial.next(there, blocked=False) is None
    assert trial.over


def test_one_that_ends_holds_nobody_up():
    there = suspects("a-0", "b-0", "c-0")
    trial = Trial(there.values())
    trial.next(there, blocked=False)
    del there["a-0"], there["b-0"]
    assert trial.next(there, blocked=False) is there["c-0"]
    there.clear()
    assert trial.next(there, blocked=False) is None
    assert trial.over


def test_those_that_find_no_room_are_not_to_blame_for_the_next_death():
    there = suspects("a-0", "b-0", "c-0")
    trial = Trial(there.values())
    trial.next(there, blocked=False)
    there["a-0"].take(Output("a-0", [1]))
    assert trial.next(there, blocked=True) is there["b-0"]
    assert trial.next(there, blocked=True) is None
    assert trial.over
    for name in ("b-0", "c-0"):
        there[name].hand_over()
        there[name].lose_engine()
        assert there[name].deaths == 2
