"""What is chosen stays chosen, also when the browser asks with an address that is older."""

import pytest
from memd_dashboard import address
from streamlit.testing.v1 import AppTest


def script() -> None:
    import streamlit as st
    from memd_dashboard import address

    st.button("first", on_click=lambda: address.choose("block", "1"))
    st.button("second", on_click=lambda: address.choose("block", "2"))
    st.button("none", on_click=lambda: address.choose("block", None))
    st.markdown(str(address.chosen("block")))


def click(page: AppTest, label: str) -> None:
    next(button for button in page.button if button.label == label).click().run()


def asked_with(page: AppTest, value: str | None = None) -> str:
    """What is chosen when the browser asks with this address."""
    page.query_params.clear()
    if value is not None:
        page.query_params["block"] = value
    page.run()
    assert not page.exception
    return page.markdown[0].value


@pytest.fixture
def page() -> AppTest:
    return AppTest.from_function(script).run()


def test_the_address_that_was_opened_counts() -> None:
    page = AppTest.from_function(script)
    assert asked_with(page, "7") == "7"


def test_an_address_from_before_a_choice_does_not_undo_it(page: AppTest) -> None:
    click(page, "first")
    assert page.query_params["block"] == "1"
    assert asked_with(page) == "1"
    assert page.query_params["block"] == "1", "the address is not mended"
    click(page, "second")
    assert asked_with(page, "1") == "2"
    assert asked_with(page) == "2"
    click(page, "none")
    assert asked_with(page, "2") == "None"
    assert "block" not in page.query_params


def test_a_link_counts(page: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    click(page, "first")
    assert asked_with(page, "5") == "5"
    monkeypatch.setattr(address, "_LATE_SECONDS", 0.0)
    assert asked_with(page, "1") == "1"
    assert asked_with(page) == "None"


def test_what_is_chosen_again_was_not_left(page: AppTest) -> None:
    for label in ("first", "second", "first"):
        click(page, label)
    assert asked_with(page, "2") == "1"
    assert asked_with(page, "1") == "1"
