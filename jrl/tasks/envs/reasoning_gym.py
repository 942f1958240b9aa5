"""Tasks of the reasoning-gym package, by dataset name. The package takes seconds to import, so it is imported when a
source is opened.

This module makes tasks reproducible and independent across seeds, although:

* some generators draw from the global state of `random` or numpy: both are seeded with (dataset, seed, index) for each
  task and restored afterwards;
* some iterate over a set of strings, whose order differs between processes (HASH_ORDERED): they are refused unless
  Python runs with PYTHONHASHSEED=0;
* task i of seed s is often task i - 1 of seed s + 1: a dataset is seeded with a hash of its name and the config's seed,
  so that runs with neighboring seeds do not share tasks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import decimal
import difflib
import enum
import fractions
import hashlib
import json
import math
import random
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jrl.tasks.envs.contract import Generated, digest_of
from jrl.tasks.example import Example, Message

# Determined by generating 40 tasks of every dataset of 0.1.25 in processes with different hash seeds (a slow test
# repeats it). For some only the reference answer differs; for codeio and intermediate_integration only one task in
# many.
HASH_ORDERED = frozenset(
    (
        "codeio",
        "intermediate_integration",
        "isomorphic_strings",
        "knight_swap",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
    )
)
_GLOBAL_STATE = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningGym:
    """One dataset of reasoning-gym."""

    dataset: str  # its name in the package, such as "chain_sum"
    level: int | None = None  # raise every attribute of its curriculum this many times; None: the dataset's defaults
    config: dict[str, float | int | str | bool] = dataclasses.field(default_factory=dict)  # fields of its config class
    size: int = 100_000  # number of tasks
    seed: int = 0  # of the generated tasks
    system: str = ""  # a system message before each question


def open_reasoning_gym(config: ReasoningGym) -> Generated:
    """Returns the source. `info` of an example is {"dataset", "config", "entry"}, from which its scorer is rebuilt.

    Raises: ValueError for an unknown dataset, level or config field (naming the nearest), a value that the dataset
        refuses, or a dataset with tasks that this process cannot reproduce.
    """
    import reasoning_gym
    from reasoning_gym import factory

    name = config.dataset
    if name == "composite":
        raise ValueError("ReasoningGym.dataset = 'composite': mix datasets with Mixture instead")
    if name not in factory.DATASETS:
        raise ValueError(f"ReasoningGym.dataset: unknown dataset {name!r}{_nearest(name, factory.DATASETS)}")
    if name in HASH_ORDERED and sys.flags.hash_randomization:
        raise ValueError(
            f"ReasoningGym.dataset = {name!r} iterates over sets of strings, so its tasks differ between processes "
            "and no run could be resumed; start Python with PYTHONHASHSEED=0 in its environment to use it"
        )
    if config.size < 1:
        raise ValueError(f"ReasoningGym.size is {config.size}: it must be at least 1")
    fields = _fields(config, factory)
    seed = int(digest_of(name, config.seed)[:8], 16) >> 1
    try:
        with fenced(name, config.seed, "dataset"):
            dataset = reasoning_gym.create_dataset(name, **{**fields, "size": config.size, "seed": seed})
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning-gym refuses {name} with {fields}: {error}") from error
    described = plain({f: v for f, v in dataclasses.asdict(dataset.config).items() if f not in ("size", "seed")})
    fingerprint = digest_of("reasoning_gym", reasoning_gym.__version__, name, config.seed, config.size, config.system,
                            json.dumps(described, sort_keys=True))  # fmt: skip

    def make(index: int) -> Example:
        with fenced(name, config.seed, index):
            entry = plain(dataset[index])
        question = Message("user", entry["question"])
        return Example(
            id=f"{name}/{fingerprint[:8]}/{index}",
            messages=(Message("system", config.system), question) if config.system else (question,),
            answer=entry["answer"],
            verifiers=("ReasoningGymScore",),
            task=name,
            info={"dataset": name, "config": described, "entry": entry},
        )

    return Generated(config.size, make, fingerprint)


def _fields(config: ReasoningGym, factory: Any) -> dict[str, Any]:
    """Returns the fields to set in the dataset's config class: those of the level, overridden by `config.config`."""
    name, config_class = config.dataset, factory.DATASETS[config.dataset][1]
    fields: dict[str, Any] = {}
    if config.level is not None:
        if not factory.has_curriculum(name):
            raise ValueError(f"ReasoningGym.level = {config.level}: {name} has no curriculum; set its fields by config")
        curriculum = factory.create_curriculum(name)
        for raised in range(config.level):
            # A list, so that `any` does not stop early and every attribute is raised; one at its maximum stays there.
            if not any([curriculum.increment_attr_level(attribute) for attribute in curriculum.attributes]):
                raise ValueError(f"ReasoningGym.level = {config.level}: the highest level of {name} is {raised}")
        if config.level < 0:
            raise ValueError(f"ReasoningGym.level = {config.level}: the lowest level is 0")
        fields = dataclasses.asdict(curriculum.generate_configuration())
    known = [f.name for f in dataclasses.fields(config_class) if f.name not in ("size", "seed")]
    for field in config.config:
        if field not in known:
            raise ValueError(f"ReasoningGym.config: {name} has no field {field!r}{_nearest(field, known)}")
    return {**{f: v for f, v in fields.items() if f in known}, **config.config}


@contextlib.contextmanager
def fenced(*name: int | str) -> Iterator[None]:
    """Seeds the global generators of `random` and numpy with `name` inside the block, and restores them afterwards.

    Only one thread can be inside: the state belongs to the process.
    """
    seed = hashlib.sha256("/".join(map(str, name)).encode()).digest()
    with _GLOBAL_STATE:
        before, numpy_before = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(int.from_bytes(seed[:4], "little"))
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(numpy_before)


def plain(value: Any) -> Any:
    """Returns `value` converted to JSON types. Tuples, arrays and sets become lists, enums their values; keys, dates,
    times, fractions, decimals, complex numbers and non-finite floats become text. Any other object becomes its type's
    name, "<Name>"."""
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return [plain(item) for item in sorted(value, key=repr)]
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    for kind in (str, int):  # a subclass becomes the base type
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, datetime.date | datetime.time | fractions.Fraction | decimal.Decimal | complex):
        return str(value)
    return f"<{type(value).__name__}>"


def _nearest(name: str, among: Any) -> str:
    near = difflib.get_close_matches(name, list(among), n=1, cutoff=0.4)
    return f"; the nearest is {near[0]!r}" if near else ""
