"""The configurations that come with jrl, by name."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def bundled_configs(package: Path = PACKAGE) -> dict[str, Path]:
    """Returns name -> file of the configurations that come with jrl: "tiny", "gsm8k/qwen3-0.6b".

    An installed wheel has them inside the package; a checkout, or an editable install of one, next to it.
    """
    inside = package / "configs"
    folder = inside if inside.is_dir() else package.parent / "configs"
    files = {file.relative_to(folder).with_suffix("").as_posix(): file for file in folder.rglob("*.gin")}
    return {name: files[name] for name in sorted(files, key=lambda name: (name.count("/"), name))}


def same_name(text: str, bundled: dict[str, Path]) -> str | None:
    """Returns the bundled configuration that "configs/tiny.gin", "tiny.gin" or "qwen3-0.6b" means; None if none."""
    name = text.removesuffix(".gin").removeprefix("configs/")
    return next((full for full in bundled if name in (full, full.rsplit("/", 1)[-1])), None)
