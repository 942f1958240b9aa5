"""The tokenizer of a run: from its folder, from the run whose weights it begins with, or a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jrl import paths
from jrl.device.processes import Processes
from jrl.experiment import Config, row_of
from jrl.plugins import Parts
from jrl.run.begin_from import Origin
from jrl.tasks.data.survey import texts_of
from jrl.tasks.envs.contract import Source
from jrl.tasks.stopping import Stop
from jrl.tasks.tokenizers import load as load_tokenizer
from jrl.tasks.tokenizers.published import PublishedTokenizer


def open_tokenizer(
    config: Config,
    parts: Parts,
    source: Source,
    folder: Path,
    origin: Origin | None,
    stop: Stop,
    processes: Processes,
    member_tokenizer: Any = None,
) -> Any:
    """Returns the run's tokenizer, which is saved in its folder.

    Args:
      source: texts to train it on, if the configured tokenizer is trained.
      origin: another run, whose tokenizer a new one begins with.
      member_tokenizer: that of another member of the same population, to use here too.

    Raises: ProcessesDisagree if another process has a different one; StopRequested if `stop` says so.
    """
    saved, tables = folder / "tokenizer", parts.tables
    if member_tokenizer is not None:
        save_tokenizer(member_tokenizer, folder)
        return member_tokenizer
    # A folder without a manifest belongs to no run. A lost one is trained again: the manifest has its fingerprint.
    if paths.exists(folder / "manifest.json") and paths.exists(saved):
        return load_tokenizer(saved, tables["tokenizers"])
    if origin is not None:
        return shared_tokenizer(load_tokenizer(origin.folder / "tokenizer", tables["tokenizers"]), folder, processes)
    texts = texts_of(source, config.data, stop=stop)
    tokenizer = row_of(tables, "tokenizers", config.tokenizer).build(config.tokenizer, texts)
    return shared_tokenizer(tokenizer, folder, processes)


def without_template(tokenizer: Any) -> str | None:
    """Returns a note on a published model that has no chat template; None for any other tokenizer."""
    if not isinstance(tokenizer, PublishedTokenizer) or tokenizer.chat is not None:
        return None
    return (
        "this model has no chat template: a prompt is plain text, as a base model reads it "
        "(HuggingFace.chat_template = FILE gives it one)"
    )


def shared_tokenizer(tokenizer: Any, folder: Path, processes: Processes) -> Any:
    """Returns the tokenizer, which one process saves. Raises ProcessesDisagree if another has a different one."""
    processes.agree("tokenizer", {"tokenizer": tokenizer.fingerprint})
    if processes.writer:
        save_tokenizer(tokenizer, folder)
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Writes a run's tokenizer into its folder, unless the run has begun with one."""
    saved = folder / "tokenizer"
    if not (paths.exists(folder / "manifest.json") and paths.exists(saved)):
        paths.make_dir(saved)
        tokenizer.save(saved)
