"""The daemon's answers as tables, numbers and charts: pure functions, tested without Streamlit."""
