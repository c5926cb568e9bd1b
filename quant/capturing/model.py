"""A capture from a model and texts by their names, in one call."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sdsa_quant import __version__
from sdsa_quant.errors import InputError

from .attention import attention_capture, require_transformers
from .capture import Capture, sdsa_capture

Progress = Callable[[int, int], None]  # tokens done, and all of them
MOST_ROWS = 1024  # of the longest text, unless `every` is given
DEFAULT_CHUNK = 512


@dataclass(frozen=True, slots=True)
class CapturedText:
    """One text of a capture."""

    name: str
    """Name of its file."""
    sha256: str
    """Of the file's bytes."""
    tokens: int
    """Tokens that the model saw of it."""


@dataclass(frozen=True, slots=True)
class ModelCapture:
    """A capture from a model, written."""

    capture: Capture
    """Layers, files and agreements."""
    model: str
    """The model, as it was named."""
    revision: str | None
    """Its commit, where it has one."""
    class_name: str
    """Class of the model."""
    texts: list[CapturedText]
    """The texts in order; each is a request."""


def capture_model(
    model: str,
    texts: Sequence[str | Path],
    output: str | Path,
    *,
    attention: Sequence[int] | None = None,
    every: int | None = None,
    tokens: int | None = None,
    chunk: int = DEFAULT_CHUNK,
    revision: str | None = None,
    device: str = "cpu",
    force: bool = False,
    progress: Progress | None = None,
) -> ModelCapture:
    """Run a model over texts and capture what its indexers score and select.

    Parameters
    ----------
    model : str
        A folder with a model and its tokenizer, or a name on the Hugging Face hub.
    texts : sequence of str or Path
        UTF-8 text files; each becomes a request.
    output : str or Path
        Folder for one safetensors file a layer.
    attention : sequence of int, optional
        Query heads whose attention is captured, for a model without an indexer.
    every : int, optional
        Keep the query row of one position in so many, the last of each text among them. By default
        the smallest power of two at which the longest text keeps at most 1,024.
    tokens : int, optional
        Take only the first tokens of each text, so many.
    chunk : int
        Tokens of a forward pass.
    revision : str, optional
        Of the model on the hub.
    device : str
        ``cpu``, ``cuda`` or ``cuda:N``.
    force : bool
        Whether to replace files that exist.
    progress : callable, optional
        Called with the tokens that are done and all of them.

    Raises
    ------
    ValueError
        A text or the model cannot be read, or as `sdsa_capture`.
    UnsupportedError
        transformers is not installed, or as `sdsa_capture`.
    CheckFailedError
        As `sdsa_capture`.
    """
    require_numbers(every=every, tokens=tokens, chunk=chunk)
    contents = [read_text(Path(path)) for path in texts]
    if not contents:
        raise InputError("must be given, got none", argument="texts")
    network, tokenizer = load_model(model, revision, device)
    token_ids = [token_ids_of(tokenizer, path, text, tokens) for path, text, _ in contents]
    if every is None:
        every = 1
        while max(map(len, token_ids)) > MOST_ROWS * every:
            every *= 2
    described = [
        CapturedText(path.name, digest, len(ids))
        for (path, _, digest), ids in zip(contents, token_ids, strict=True)
    ]
    commit = getattr(network.config, "_commit_hash", None) or revision
    metadata = {
        "model": model,
        "revision": commit or "",
        "texts": json.dumps([[each.name, each.sha256, each.tokens] for each in described]),
        "every": str(every),
        "transformers": _transformers_version(),
        "sdsa": __version__,
    }
    context: AbstractContextManager[Capture]
    if attention is None:
        context = sdsa_capture(network, output, every=every, metadata=metadata, force=force)
    else:
        context = attention_capture(
            network, output, attention, every=every, metadata=metadata, force=force
        )
    with quiet(), context as capture, torch.no_grad():
        total, done = sum(map(len, token_ids)), 0
        for ids in token_ids:
            capture.offset = (len(ids) - 1) % every  # so that the last position is kept
            for passed in run_text(network, ids, chunk):
                done += passed
                if progress is not None:
                    progress(done, total)
    return ModelCapture(capture, model, commit, type(network).__name__, described)


def require_numbers(**numbers: int | None) -> None:
    """Refuse numbers below 1.

    Raises
    ------
    ValueError
        One is; the message names it.
    """
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise InputError(f"must be at least 1, got {number}", argument=name)


def load_model(model: str, revision: str | None, device: str) -> tuple[Any, Any]:
    """A model of transformers in its own dtype, ready to run, and its tokenizer.

    Raises
    ------
    ValueError
        It cannot be read; the message has transformers' reason.
    UnsupportedError
        transformers is not installed.
    """
    require_transformers()
    import transformers

    with quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(model, revision=revision)
            kinds = [getattr(transformers, name, None) for name in config.architectures or []]
            known = [kind for kind in kinds if kind is not None]
            kind = known[0] if known else transformers.AutoModelForCausalLM
            network = kind.from_pretrained(model, revision=revision, dtype="auto")
            tokenizer = transformers.AutoTokenizer.from_pretrained(model, revision=revision)
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"{model}: cannot be read as a model: {reason}") from error
    return network.eval().to(device), tokenizer


def run_text(network: Any, ids: Sequence[int], chunk: int) -> Iterator[int]:
    """Run a text through a model in parts, with a cache; yields how many tokens each part had."""
    # Without the head over the vocabulary, which no capture needs.
    body = getattr(network, "base_model", network)
    cache = None
    for start in range(0, len(ids), chunk):
        part = torch.tensor([ids[start : start + chunk]], dtype=torch.int64, device=network.device)
        output = body(input_ids=part, past_key_values=cache, use_cache=len(ids) > chunk)
        cache = output.past_key_values
        yield part.shape[1]


def read_text(path: Path) -> tuple[Path, str, str]:
    """A text, its file and the SHA-256 of its bytes.

    Raises
    ------
    ValueError
        It cannot be read, or is not UTF-8.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return path, data.decode(), hashlib.sha256(data).hexdigest()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: must be text in UTF-8: {error.reason}") from error


def token_ids_of(tokenizer: Any, path: Path, text: str, most: int | None) -> list[int]:
    """The tokens of a text, at least one.

    Raises
    ------
    ValueError
        It has none.
    """
    ids = tokenizer(text)["input_ids"][:most]
    if not ids:
        raise InputError(f"{path}: has no tokens")
    return list(ids)


def _transformers_version() -> str:
    import transformers

    return str(transformers.__version__)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what transformers writes about weights and progress away from the streams."""
    import transformers

    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
