"""The script Streamlit runs: the pages and what is beside them. Started by `memd dashboard`."""

from pathlib import Path

import streamlit as st

from memd_dashboard import frame, redraws
from memd_dashboard.ui import FIRST_PAGE, PAGES

redraws.install()
# Before the pages are known: else the browser asks a font server of the Internet for their icons.
st.set_page_config(page_icon=str(Path(__file__).with_name("icon.png")), layout="wide")
known = frame.pages()
known.update(
    {
        path: st.Page(
            draw, title=title, icon=f":material/{icon}:", url_path=path, default=path == FIRST_PAGE
        )
        for pages in PAGES.values()
        for path, (title, icon, draw) in pages.items()
    }
)
page = st.navigation({section: [known[path] for path in pages] for section, pages in PAGES.items()})
st.set_page_config(page_title=f"{page.title} · memd")
frame.sidebar()
page.run()
frame.open_question()
