"""The members of a sweep: runs named by their bindings. All are read and checked before any starts."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from jrl import config as gin
from jrl.compatibility import notes_of_start
from jrl.config.errors import COMMAND_LINE, ConfigError
from jrl.config.sweep import Axis, Point, check_count, draw, expand_ranges, grid, pairs, read_axes
from jrl.config.syntax import read_statements
from jrl.experiment import Config, config_classes
from jrl.plugins import load_parts
from jrl.resolve import PATH_FIELDS, checked, find_config, part_names
from jrl.run.stage_steps import ends
from jrl.tasks.verifiers.source import source_text
from jrl.tools.sweep.settings import DATA_FILES, IRRELEVANT, SEED, settings_of_config

PARTS = "Config.parts"
LONGEST_NAME = 120  # characters of a folder name, before a hash is added


class Member(NamedTuple):
    """One run of a sweep."""

    name: str  # of its folder, such as "learning_rate=0.001,seed=0"
    bindings: tuple[str, ...]  # one for each axis that applies to it
    fixed: tuple[str, ...]  # those of Sweep.bindings that apply to it
    identity: str  # hash of its configuration, without the paths of data files
    steps: int  # of all its stages
    seed: str
    settings: Mapping[str, str]  # the fields of its configuration that can matter
    notes: tuple[str, ...] = ()  # on what is legal and probably not meant


class Sweep(NamedTuple):
    """Members in the order in which they run, and what they were generated from."""

    config: str  # as the user named it
    bindings: tuple[str, ...]  # from the command line, without those of the axes
    axes: tuple[Axis, ...]
    members: tuple[Member, ...]
    parts: Mapping[str, str] = MappingProxyType({})  # {parts file: sha256 of its source}, as it was read


def read_sweep(
    config: str, bindings: Sequence[str], how: str = "grid", count: int | None = None, seed: int | None = None
) -> Sweep:
    """Returns the sweep that a gin file and bindings with lists describe.

    Args:
      how: how to combine the lists: 'grid', every combination; 'random', `count` combinations drawn with `seed`;
        'pairs', the first values together, then the second values, and so on. Each combination runs with every value of
        Run.seed.

    Raises: ConfigError or ValueError for anything that a member would refuse, for two members that are the same run,
    and if nothing is swept.
    """
    if how != "random" and (count is not None or seed is not None):
        raise ValueError(f"--count and --seed go with --how random, and not with --how {how}")
    if how == "random" and count is None:
        raise ValueError("--how random draws some of the combinations; say how many: --count N")
    file = find_config(config)
    texts = [expand_ranges(binding) for binding in bindings]
    named = [statement.value for statement in read_statements(file, texts, Config) if statement.name == PARTS][-1:]
    if any(isinstance(item, list) for value in named if isinstance(value, list) for item in value):
        raise ConfigError(
            COMMAND_LINE,
            f"{PARTS} cannot be swept: the members of a sweep share their parts files. Name all files in one list and "
            "sweep what selects their parts, as in Online.objective=[@A(),@B()]; or sweep with each list into a folder "
            "of its own, and compare them with `jrl compare`",
        )
    parts = part_names(file, texts)
    loaded = load_parts(parts)
    tables = config_classes(loaded.tables)
    axes, fixed = read_axes(file, bindings, Config, tables)
    load = lambda bindings: gin.load(file, bindings, Config, tables, PATH_FIELDS)
    if not axes:
        checked(load(fixed), loaded)  # a misspelled field is reported instead
        raise ConfigError(COMMAND_LINE, f"nothing is swept: give at least one field a list, such as {SEED}=[0..4]")
    points = combine(axes, how, count, seed or 0)
    applying = without_unread(fixed, points, lambda bindings: gin.reached(file, bindings, Config, tables))
    names = member_names(axes, [point for _, point in applying])
    members: dict[str, Member] = {}
    for (constant, point), name in zip(applying, names):
        resolved = checked(load((*constant, *point)), loaded)
        run = gin.identity(resolved, IRRELEVANT)
        if run in members:
            raise ConfigError(COMMAND_LINE, f"two members are the same run: {same_run(members[run], point)}")
        identity = gin.identity(resolved, (*IRRELEVANT, *DATA_FILES))
        settings = settings_of_config(resolved, tables)
        notes = tuple(notes_of_start(resolved, loaded.tables))
        members[run] = Member(name, point, constant, identity, ends(resolved)[-1], *settings, notes)
    return Sweep(config, fixed, axes, tuple(members.values()), loaded.hashes)


def parts_now(sweep: Sweep) -> dict[str, str]:
    """Returns `Sweep.parts` as the files are now, without those that cannot be read."""
    now = {}
    for path in sweep.parts:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            now[path] = hashlib.sha256(source_text(Path(path)).encode()).hexdigest()
    return now


def settings_now(sweep: Sweep, member: Member) -> tuple[str, Mapping[str, str]]:
    """Returns a member's seed and settings as the gin file is now. Raises: ConfigError, PartError or OSError if it or a
    parts file cannot be read."""
    file = find_config(sweep.config)
    tables = config_classes(load_parts(part_names(file, sweep.bindings)).tables)
    bindings = [*member.fixed, *member.bindings]
    return settings_of_config(gin.load(file, bindings, Config, tables, PATH_FIELDS), tables)


def combine(axes: Sequence[Axis], how: str, count: int | None, seed: int) -> list[Point]:
    """Returns the bindings of every member. Members that differ only in Run.seed are adjacent."""
    seeds = [axis for axis in axes if axis.name == SEED]
    others = [axis for axis in axes if axis.name != SEED]
    if how == "random":
        if not others:
            raise ValueError(f"--how random draws combinations of lists, and only {SEED} has one; leave --how out")
        points = draw(others, count or 0, seed)
    else:
        points = pairs(others) if how == "pairs" and others else grid(others)
    runs = grid(seeds)
    check_count(len(points) * len(runs))
    return [(*point, *run) for point in points for run in runs]


def without_unread(
    fixed: Point, points: Sequence[Point], read_names: Callable[[Sequence[str]], set[str]]
) -> list[tuple[Point, Point]]:
    """Returns (fixed bindings, point) of every member, without the bindings that only other members read, such as those
    of an objective that they select. Points that differ in such bindings alone are one member. What no member reads
    stays, and is refused later.

    Args:
      read_names: returns the names of the bindings that the configuration of a member reads.
    """
    read = [read_names((*fixed, *point)) for point in points]
    optional = set().union(*read)
    members: list[tuple[Point, Point]] = []
    for point, names in zip(points, read):
        applies = lambda binding, names=names: (name := name_of(binding)) in names or name not in optional
        member = (tuple(filter(applies, fixed)), tuple(filter(applies, point)))
        if member not in members or member[1] == point:  # a point that is listed twice is refused later
            members.append(member)
    return members


def name_of(binding: str) -> str:
    """Returns the name that a binding sets: "Config.parts" of "parts=['a.py']"."""
    (statement,) = read_statements(None, [binding], Config)
    return statement.name


def same_run(first: Member, second: Point) -> str:
    if first.bindings == second:
        return f"{', '.join(second)} is listed twice"
    return f"{', '.join(first.bindings)} and {', '.join(second)}"


def member_names(axes: Sequence[Axis], points: Sequence[Point]) -> list[str]:
    """Returns a folder name for every point: its bindings, without characters that are special in a path or a shell.

    A field's section is left out if no other axis has a field of that name. Names that are too long or not unique end
    in a hash of the bindings.
    """
    names = {name: short.replace("/", "-") for name, short in short_names(axis.name for axis in axes).items()}
    plain = [",".join(f"{names[name]}={_slug(value)}" for name, value in map(split_binding, point)) for point in points]
    return [
        f"{name[:LONGEST_NAME]}-{hashlib.sha256(repr(point).encode()).hexdigest()[:8]}"
        if len(name) > LONGEST_NAME or plain.count(name) > 1
        else name
        for name, point in zip(plain, points)
    ]


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Returns {full name: its field}, such as {"Run.seed": "seed"}; the full name if two share a field."""
    names = list(names)
    fields = [name.rpartition(".")[2] for name in names]
    return {name: field if fields.count(field) == 1 else name for name, field in zip(names, fields)}


def split_binding(binding: str) -> tuple[str, str]:
    name, _, value = binding.partition("=")
    return name, value


def train_arguments(sweep: Sweep, member: Member, folder: str, options: Sequence[str] = ()) -> list[str]:
    """Returns the arguments of `jrl` to train a member in `folder`."""
    return ["train", sweep.config, *member.fixed, *member.bindings, "--run", folder, *options]


def _slug(value: str) -> str:
    text = re.sub(r"[^A-Za-z0-9.+-]+", "-", re.sub(r"['\"@()\[\]{}]", "", value)).strip("-.")
    negative = value.startswith("-")
    return f"-{text}" if negative else text or "empty"
