"""How the dashboard is started: the command line of Streamlit, with memd's look."""

import sys
from pathlib import Path

SERVER = Path(__file__).with_name("server.py")

# Both themes are given, so that the viewer's system chooses between them.
_OPTIONS = {
    "server.headless": "true",
    "server.fileWatcherType": "none",
    "browser.gatherUsageStats": "false",
    # No message refers to one that the browser should still have: when parts of a page are drawn
    # again all the time it may just have dropped it, and then loses its connection.
    "global.minCachedMessageSize": "1e12",
    "client.toolbarMode": "viewer",
    "client.showErrorDetails": "none",
    "theme.baseFontSize": "15",
    "theme.baseRadius": "0.4rem",
    "theme.light.primaryColor": "#0072B2",
    "theme.light.backgroundColor": "#FFFFFF",
    "theme.light.secondaryBackgroundColor": "#F5F7F9",
    "theme.light.textColor": "#1C2733",
    "theme.light.borderColor": "#DCE2E8",
    "theme.dark.primaryColor": "#56B4E9",
    "theme.dark.backgroundColor": "#11161C",
    "theme.dark.secondaryBackgroundColor": "#1A2129",
    "theme.dark.textColor": "#E4E9EE",
    "theme.dark.borderColor": "#303A45",
}


def command(host: str, port: int, base_path: str = "") -> list[str]:
    """What to execute; the address of the daemon and the key are in the environment."""
    options = {**_OPTIONS, "server.address": host, "server.port": str(port)}
    if base_path:
        options["server.baseUrlPath"] = base_path
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    return [sys.executable, "-m", "streamlit", "run", str(SERVER), *flags]
