"""The kinds of error memd has, split by who can do something about them."""

import re


class MemdError(Exception):
    """Base of every error memd raises on purpose."""


class RequestError(MemdError):
    """The caller's fault: a bad value, or a request that can never be served.

    Args:
        message: What is wrong, with the value and the limit.
        param: The field at fault, or None.
        code: Machine-readable code of the OpenAI error body, or None.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class SettingsError(MemdError):
    """A settings tree, file, variable or change is invalid.

    Args:
        problems: One message for each key at fault, by dotted key.
    """

    def __init__(self, problems: dict[str, str]) -> None:
        super().__init__("; ".join(f"{key}: {why}" for key, why in problems.items()))
        self.problems = problems


class ModelError(MemdError):
    """A model cannot be found, read or served; the message names the file and what is wrong."""


class PoolExhausted(MemdError):
    """Too few pages are free or can be made free now. A passing lack: wait, or preempt."""


class OutOfDeviceMemory(MemdError):
    """The device refused to commit a block."""


class InvariantError(MemdError):
    """memd's own state contradicts itself. A bug."""


def requirement(message: str) -> str:
    """What pydantic says is wrong with a value, in memd's words: `must be at least 1`."""
    text = message.removeprefix("Value error, ")
    text = re.sub(r"^(Input|String|List|Dictionary|Value) should ", "must ", text)
    text = text.replace("greater than or equal to", "at least")
    text = re.sub("a valid dictionary( or instance of .*)?$", "an object", text)
    text = re.sub("an? (valid )?integer", "a whole number", text)
    text = text.replace("less than or equal to", "at most")
    return re.sub(r", (unable to|got a number) .*", "", text)
