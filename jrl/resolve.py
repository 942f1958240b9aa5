"""From a gin file to a configuration that can run, before anything heavy is imported or any device is touched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jrl import config as gin
from jrl.experiment import Config, check, config_classes
from jrl.plugins import Part, Parts, load_parts


def load_config(
    config: str | Path | Config, bindings: Sequence[str] = (), parts: Sequence[Part] = ()
) -> tuple[Config, Parts]:
    """Returns the resolved config and the tables it was resolved with.

    Args:
      config: a .gin file, or a Config.
      bindings: "NAME=VALUE", over what the file says.
      parts: beside those the config names; see jrl.plugins.

    Raises: ConfigError naming file and line; PartError for a part that cannot be used.
    """
    if isinstance(config, Config):
        if bindings:
            raise gin.ConfigError("bindings", "bindings change a file, not a Config; use dataclasses.replace")
        loaded = load_parts([*config.parts, *parts])
        return checked(config, loaded), loaded
    named, _ = gin.peek(str(config), bindings, Config, "parts")
    loaded = load_parts([*(named or ()), *parts])
    return checked(gin.load(str(config), bindings, Config, config_classes(loaded.tables)), loaded), loaded


def checked(config: Config, parts: Parts) -> Config:
    """Returns the config after the checks that need no device. Raises ConfigError for what cannot run."""
    try:
        check(config, parts.tables)
    except ValueError as error:
        raise gin.ConfigError("the configuration", str(error)) from error
    return config
