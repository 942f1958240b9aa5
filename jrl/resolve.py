"""Resolves a gin file to a configuration that can run, before anything heavy is imported or any device is used."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from jrl import config as gin
from jrl import paths
from jrl.compatibility import check
from jrl.config.bundled import PACKAGE, bundled_configs, same_name
from jrl.experiment import Config, config_classes
from jrl.plugins import AS_OBJECTS, Part, PartError, Parts, load_parts, saved_parts

# Fields that name files. A relative path in a gin file is looked up in the current directory, then in the file's
# folder.
PATH_FIELDS = (
    "Config.parts",
    "Dataset.path",
    "Jsonl.path",
    "Published.path",
    "Published.adapter",
    "HuggingFace.path",
    "HuggingFace.chat_template",
    "SentencePiece.path",
    "RewardModel.path",
    "RewardModel.members",
    "Gate.path",
)


def find_config(config: str | Path, package: Path = PACKAGE) -> str:
    """Returns the gin file that `config` names: a file that exists, else a bundled configuration.

    The name of a missing .gin file is returned too, unless a bundled configuration has that name: the gin reader's
    error suggests similar names in its folder.

    Raises: ConfigError with the nearest name if `config` is neither.
    """
    text = os.fspath(config)
    if os.path.exists(text) and not os.path.isdir(text):
        return text
    bundled = bundled_configs(package)
    if text in bundled:
        return str(bundled[text])
    same = same_name(text, bundled)
    if text.endswith(".gin") and same is None:
        return text
    guess = same or gin.nearest(text.removeprefix("configs/"), bundled)
    hint = f"; did you mean {guess}?" if guess else ""
    what = "a folder, not a .gin file" if os.path.isdir(text) else "neither a file nor a bundled configuration"
    raise gin.ConfigError(repr(text), f"{what}{hint} (`jrl list configs` shows the bundled ones)")


def load_config(
    config: str | Path | Config, bindings: Sequence[str] = (), parts: Sequence[Part] = ()
) -> tuple[Config, Parts]:
    """Returns the resolved config and the tables it was resolved with.

    Args:
      config: a .gin file, the name of a bundled configuration (`jrl list configs`), or a Config.
      bindings: "NAME=VALUE", which override the file.
      parts: in addition to those that the config names; see jrl.plugins.

    Relative paths in a gin file (`parts`, data, models; see PATH_FIELDS) are resolved against the current directory
    first, then against the folder of the file that binds them.

    Raises: ConfigError naming file and line; PartError for a part that cannot be used.
    """
    bindings = bindings if isinstance(bindings, str | Mapping) else [*bindings]  # a generator is read once
    if not isinstance(bindings, list) or not all(isinstance(binding, str) for binding in bindings):
        raise gin.ConfigError("bindings", "pass a list of strings: ['Online.steps = 60', 'Run.seed = 1']")
    if isinstance(parts, str | Path | Mapping) or callable(parts):
        raise PartError(f"parts must be a list, even with one part: [{getattr(parts, '__name__', repr(parts))}]")
    if isinstance(config, Config):
        if bindings:
            raise gin.ConfigError("bindings", "bindings override a file, not a Config; use dataclasses.replace")
        loaded = load_parts([*config.parts, *parts])
        return checked(config, loaded), loaded
    file = find_config(config)
    loaded = load_parts([*part_names(file, bindings), *parts])
    return checked(gin.load(file, bindings, Config, config_classes(loaded.tables), PATH_FIELDS), loaded), loaded


def load_run_config(folder: Path, bindings: Sequence[str] = ()) -> tuple[Config, Parts]:
    """Returns the configuration of a run's folder, with the parts saved in it. Raises ConfigError."""
    file = str(folder / "config.gin")
    if gin.peek(None, bindings, Config, "parts")[0] is not None:
        raise gin.ConfigError("command line", f"a run is opened with the parts in {folder / 'parts'}, as it was "
                              "trained; leave out Config.parts")  # fmt: skip
    try:
        return load_config(file, [*bindings, "Config.parts=[]"], saved_parts(folder / "parts"))
    except gin.ConfigError as error:
        if not error.location.startswith(file):  # of the bindings
            raise
        manifest = paths.read_object(folder / "manifest.json") if paths.exists(folder / "manifest.json") else {}
        if not any(name.startswith(AS_OBJECTS) for name in manifest.get("identity", {}).get("parts", {})):
            raise
        raise gin.ConfigError(
            error.location,
            f"{error.reason}. The run has parts that were given as objects, which are not saved. To open a run, write "
            "them to a file and train with Config.parts = ['FILE.py']",
        ) from error


def part_names(file: str, bindings: Sequence[str]) -> list[Part]:
    """Returns the parts that a gin file and bindings name, relative paths resolved as in `load_config`."""
    named, binding_file = gin.peek(file, bindings, Config, "parts")
    return [paths.beside(part, binding_file) if isinstance(part, str) else part for part in named or ()]


def checked(config: Config, parts: Parts) -> Config:
    """Returns the config, after the checks that need no device. Raises ConfigError if it cannot run."""
    try:
        check(config, parts.tables)
    except ValueError as error:
        raise gin.ConfigError("the configuration", str(error)) from error
    return config
