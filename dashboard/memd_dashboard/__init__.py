"""The operator's dashboard: Streamlit pages over the admin API."""
