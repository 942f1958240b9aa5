"""A user's own parts: what is refused when they are loaded, and what of them travels."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import linecache
import os
import pathlib
import re
import subprocess
import sys
import types
import typing

import jax
import optax
import pytest

from jrl import plugins
from jrl.config import ConfigError
from jrl.learning.optimizers.contract import Optimizer
from jrl.learning.optimizers.settings import OptimizerSettings
from jrl.plugins import PartError, load_parts, part_files, saved_parts
from jrl.resolve import load_config, load_run_config
from jrl.rollout.strategies.contract import Strategy
from jrl.rollout.strategies.partial import FirstSegment
from jrl.tasks.envs.contract import Environment, digest_of, tasks_of
from jrl.tasks.example import Example, Message
from jrl.tasks.verdict import Status
from jrl.tasks.verifiers import VerifierSpec
from jrl.tasks.verifiers.pool import Item, Pool
from jrl.tasks.verifiers.source import PartSource
from jrl.tools.sweep.members import Sweep, parts_now
from jrl.types import traced


@dataclasses.dataclass(frozen=True)
class Own:
    pass


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder / f"{next(iter(files))}.py"


def test_a_verifier_that_takes_one_argument_is_refused_when_it_is_loaded(tmp_path):
    path = write(tmp_path, mine="def short(completion):\n    return 1.0\nVERIFIERS = {'short': short}\n")
    with pytest.raises(PartError) as refused:
        load_parts([path])
    assert "'short' is defined as short(completion) (" in str(refused.value)
    assert f"{path}:1" in str(refused.value)
    assert "is called with (completion, example)" in str(refused.value)


def needs_three(completion, example, threshold):
    return 1.0


def keyword_only(completion, example, *, threshold):
    return 1.0


@pytest.mark.parametrize("function", [needs_three, keyword_only])
def test_a_function_with_too_many_arguments_is_refused_by_name(function):
    with pytest.raises(PartError, match=rf"'{function.__name__}' is defined as .*test_plugins.py.*'threshold'"):
        load_parts([function])


@pytest.mark.parametrize(
    ("table", "decorator", "base", "said"),
    [
        ("OPTIMIZERS", "@traced", "", r"OPTIMIZERS\['Own'\] must derive from OptimizerSettings"),
        (
            "OPTIMIZERS",
            "@frozen",
            "(OptimizerSettings)",
            r"OPTIMIZERS\['Own'\] is not a pytree; decorate it with @traced",
        ),
        ("CURRICULA", "@frozen", "", r"CURRICULA\['Own'\] must derive from OutcomeMemory"),
        ("CURRICULA", "", "(OutcomeMemory)", r"CURRICULA\['Own'\] is not a frozen dataclass; decorate it"),
    ],
)
def test_a_configuration_that_lacks_what_jrl_reads_is_refused(tmp_path, table, decorator, base, said):
    text = f"""
import dataclasses
from jrl.learning.optimizers.contract import Optimizer
from jrl.learning.optimizers.settings import OptimizerSettings
from jrl.tasks.data.curricula import Curriculum, OutcomeMemory
from jrl.types import traced
frozen = dataclasses.dataclass(frozen=True, kw_only=True)
{decorator}
class Own{base}:
    learning_rate: float = 1.0
OPTIMIZERS = {{"Own": Optimizer(Own, lambda config, leaves: None)}}
CURRICULA = {{"Own": Curriculum(Own, lambda config, table: table.rate)}}
del {"CURRICULA" if table == "OPTIMIZERS" else "OPTIMIZERS"}
"""
    (tmp_path / "own.py").write_text(text, encoding="utf-8")
    with pytest.raises(PartError, match=said):
        load_parts([tmp_path / "own.py"])


@pytest.mark.parametrize(
    ("table", "row", "said"),
    [
        ("OPTIMIZERS", "Optimizer(Rates, lambda config: None)", r"direction takes \(config\); .* \(config, leaves\)"),
        ("STRATEGIES", "Strategy(Own, prefix=lambda config, visit: ())", r"prefix takes \(config, visit\); it is"),
        ("CURRICULA", "Curriculum(Outcomes, lambda table: table.rate)", r"weights takes \(table\); it is called"),
        ("CURRICULA", "Curriculum(Outcomes, 1.0)", r"weights is a number|weights is .*float"),
        ("CURRICULA", "Curriculum(Outcomes, None)", r"weights is None; it must be a function \(config, table\)"),
        ("CURRICULA", "Curriculum(Outcomes, max, limit=None)", r"limit is None; it must be a function"),
        ("STRATEGIES", "Strategy(Own, roles=('reference',))", r"roles is a tuple.*; it must be a function \(config\)"),
        ("CURRICULA", "Curriculum(Outcomes, max, window=8)", r"window is .*int.*; it must be a function \(config\)"),
    ],
)
def test_a_function_with_other_arguments_is_refused(tmp_path, table, row, said):
    text = f"""
import dataclasses
from jrl.learning.optimizers.contract import Optimizer
from jrl.learning.optimizers.settings import OptimizerSettings
from jrl.rollout.strategies.contract import Strategy
from jrl.tasks.data.curricula import Curriculum, OutcomeMemory
from jrl.types import traced
@traced
class Rates(OptimizerSettings):
    pass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Own:
    pass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcomes(OutcomeMemory):
    pass
row = {row}
{table} = {{row.config.__name__: row}}
"""
    (tmp_path / "own.py").write_text(text, encoding="utf-8")
    with pytest.raises(PartError, match=said):
        load_parts([tmp_path / "own.py"])


@pytest.mark.parametrize("table", sorted(plugins.ARGUMENTS))
def test_the_arguments_of_every_function_of_a_row_are_known(table):
    fields = typing.get_type_hints(plugins.ROWS[table])
    functions = {name for name, kind in fields.items() if "Callable[" in str(kind)}
    assert functions == {*plugins.ARGUMENTS[table]}


SHARED = """
import dataclasses
from jrl.tasks.data.curricula import Curriculum, OutcomeMemory
from jrl.tasks.envs.contract import Environment
frozen = dataclasses.dataclass(frozen=True)
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Own: size: set[int] = frozenset()\nENVS", r"Own\.size: the annotation set\[int\] is not supported"),
        ("class Own: size: 'Nowhere' = 1\nENVS", "name 'Nowhere' is not defined"),
        (
            "class Own: size: int = 1\nENVS = {'Own': Environment(Own, print)}\n"
            "@frozen\nclass Own(OutcomeMemory): pass\nCURRICULA",
            "two config classes are named 'Own'",
        ),
    ],
)
def test_a_configuration_that_no_binding_can_set_is_refused_by_the_name_of_its_part(tmp_path, text, said):
    row = "Curriculum(Own, max)" if text.endswith("CURRICULA") else "Environment(Own, print)"
    (tmp_path / "own.py").write_text(f"{SHARED}@frozen\n{text} = {{'Own': {row}}}\n", encoding="utf-8")
    with pytest.raises(PartError, match=rf"part .*own\.py: .*{said}"):
        load_parts([tmp_path / "own.py"])


def test_a_row_whose_score_lacks_the_config_is_refused(tmp_path):
    text = """
import dataclasses
from jrl.tasks.verifiers import Verifier
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine:
    weight: float = 1.0
VERIFIERS = {"Mine": Verifier(Mine, lambda completion, example: 1.0)}
"""
    with pytest.raises(PartError, match=r"'Mine' is defined .* is called with \(config, completion, example\)"):
        load_parts([write(tmp_path, mine=text)])


def test_a_verifier_whose_configuration_has_no_weight_is_refused_when_it_is_loaded(tmp_path):
    text = """
import dataclasses
from jrl.tasks.verifiers import Verifier
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine:
    half: float = 0.5
VERIFIERS = {"Mine": Verifier(Mine, lambda config, completion, example: 1.0)}
"""
    with pytest.raises(PartError, match=r"VERIFIERS\['Mine'\] has no field `weight`, .* add `weight: float = 1\.0`"):
        load_parts([write(tmp_path, mine=text)])


def test_defaults_and_star_arguments_are_fine(tmp_path):
    text = """
def with_default(completion, example, threshold=0.5): return 1.0
def any_arguments(*arguments, **options): return True
VERIFIERS = {"with_default": with_default, "any_arguments": any_arguments}
"""
    assert load_parts([write(tmp_path, mine=text)]).added["verifiers"] == ("with_default", "any_arguments")


MINE = """
import json
from half import halved
def score(completion, example):
    import late_constants
    return halved(len(json.loads(completion))) + late_constants.BONUS
VERIFIERS = {"score": score}
"""
HALF = "import constants\ndef halved(x):\n    return x / constants.TWO\n"
FILES = {"mine": MINE, "half": HALF, "constants": "TWO = 2\n", "late_constants": "BONUS = 10\n", "unused": "1 / 0\n"}
EXAMPLE = Example("e", (Message("user", "q"),), answer="1")


@pytest.fixture(autouse=True)
def no_neighbor_outlives_its_test():
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if hasattr(sys.modules[name], "__jrl_neighbor__"):
            del sys.modules[name]


def score_of(parts) -> float:
    return parts.tables["verifiers"]["score"].score(None, "[1, 2, 3]", EXAMPLE)


def test_a_part_can_import_its_neighbors_and_they_theirs(tmp_path):
    parts = load_parts([write(tmp_path, **FILES)])
    assert score_of(parts) == 11.5  # 3 / 2 + 10
    assert [n.name for n in parts.texts[0].neighbors] == ["constants", "half", "late_constants"]


def test_neighbors_reach_the_verifier_workers_as_text(tmp_path):
    parts = load_parts([write(tmp_path, **FILES)])
    for name in FILES:
        (tmp_path / f"{name}.py").unlink()
    with Pool(
        [VerifierSpec("score", {})], parts.sources, workers=1, cpu_seconds=2, wall_seconds=10, memory_mb=512
    ) as pool:
        ((verdict,),) = pool.collect(pool.submit([Item("[1, 2, 3]", EXAMPLE, (0,))]))
    assert (verdict.status, verdict.reward) == (Status.CORRECT, 11.5)


def test_a_byte_order_mark_is_no_part_of_the_source(tmp_path):
    path = write(tmp_path, mine="from near import V\nVERIFIERS = {'V': V}\n", near="def V(completion, example): ...\n")
    plain = load_parts([path])
    for file in tmp_path.glob("*.py"):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())  # as some editors write it
    marked = load_parts([path])
    assert (marked.hashes, part_files(marked)) == (plain.hashes, part_files(plain))
    assert parts_now(Sweep("c", (), (), (), marked.hashes)) == marked.hashes


def test_neighbors_are_hashed_by_file(tmp_path):
    path = write(tmp_path, **FILES)
    hashes = load_parts([path]).hashes
    modules = ("mine", "constants", "half", "late_constants")
    assert hashes == {str(tmp_path / f"{n}.py"): hashlib.sha256(FILES[n].encode()).hexdigest() for n in modules}


def test_parts_kept_in_a_folder_load_again_in_their_order_with_their_neighbors(tmp_path):
    (tmp_path / "a").mkdir()
    others = [write(tmp_path, **{f"other{i}": f"ENVS = {{}}\nNUMBER = {i}\n"}) for i in range(11)]
    parts = load_parts([*others, write(tmp_path / "a", **FILES)])
    (tmp_path / "kept").mkdir()
    for name, text in part_files(parts).items():
        (tmp_path / "kept" / name).write_text(text)
    again = load_parts(saved_parts(tmp_path / "kept"))
    assert [part.source for part in again.texts] == [part.source for part in parts.texts]
    assert score_of(again) == 11.5
    assert saved_parts(tmp_path / "none") == []


def test_a_neighbor_that_was_edited_is_run_anew_with_all_that_import_it(tmp_path):
    path = write(tmp_path, **FILES)
    assert score_of(load_parts([path])) == 11.5
    (tmp_path / "constants.py").write_text("TWO = 4\n")
    assert score_of(load_parts([path])) == 10.75


def test_two_parts_share_a_neighbor(tmp_path):
    first = write(tmp_path, first="import shared\nENVS = {}\n", shared="THING = object()\n")
    second = write(tmp_path, second="import shared\nENVS = {}\n")
    load_parts([first, second])
    assert sys.modules["jrl_part_0"].shared.THING is sys.modules["jrl_part_1"].shared.THING


def test_neighbors_of_one_name_in_two_folders_are_refused(tmp_path):
    paths = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        text = {f"mine_{folder}": "import shared\nENVS = {}\n", "shared": f"# {folder}\n"}
        paths.append(write(tmp_path / folder, **text))
    with pytest.raises(PartError, match=r"a/shared\.py would be one module, 'shared'; rename one"):
        load_parts(paths)


def test_a_neighbor_with_the_name_of_a_loaded_module_is_refused(tmp_path):
    with pytest.raises(PartError, match=r"numpy\.py has the name of another module that is loaded, .*numpy/__init__"):
        load_parts([write(tmp_path, mine="import numpy\nENVS = {}\n", numpy="")])


def test_a_file_named_like_the_standard_library_is_no_neighbor(tmp_path):
    parts = load_parts([write(tmp_path, mine="import json\nENVS = {}\n", json="1 / 0\n")])
    assert parts.texts[0].neighbors == () and sys.modules["json"] is json


def test_a_file_that_the_program_has_imported_itself_stays_as_it_is(tmp_path, monkeypatch):
    path = write(tmp_path, mine="import shared\nENVS = {}\n", shared="")
    module = types.ModuleType("shared")
    module.__file__ = str(tmp_path / "shared.py")
    monkeypatch.setitem(sys.modules, "shared", module)
    load_parts([path])
    assert sys.modules["jrl_part_0"].shared is module


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"mine": "import a\nENVS = {}", "a": "import b", "b": "import a"}, r"b\.py and .*a\.py import each other"),
        ({"mine": "import a\nENVS = {}", "a": "import mine"}, "a.py and .*mine.py import each other"),
        ({"mine": "import a\nENVS = {}", "a": "def f(:"}, r"SyntaxError.*a\.py"),
        ({"mine": "import a\nENVS = {}", "a": "1 / 0"}, "mine.py: ZeroDivisionError"),
        (
            {
                "mine": "from jrl.algos.grpo import OBJECTIVE\nclass Mine:\n    pass\n"
                "ALGOS = {'Mine': OBJECTIVE._replace(config=Mine)}"
            },
            "'Mine'.* is not a pytree; decorate it with @traced",
        ),
        (
            {
                "mine": "import dataclasses\nfrom jrl.tasks.envs.contract import Environment\n"
                "@dataclasses.dataclass\nclass Mine:\n    pass\nENVS = {'Mine': Environment(Mine, open)}"
            },
            r"'Mine'.* is not a frozen dataclass; decorate it with @dataclasses.dataclass\(frozen=True\)",
        ),
        *(
            (
                {
                    "mine": "from jrl.algos.grpo import GRPO, OBJECTIVE\nimport dataclasses\n"
                    f"{lines}\n    pass\nALGOS = {{'Mine': OBJECTIVE._replace(config=Mine)}}"
                },
                "'Mine'.* is not a pytree; decorate it with @traced",
            )
            for lines in ("@dataclasses.dataclass\nclass Mine:", "class Mine(GRPO):", "class Mine(dict):")
        ),
        ({"mine": "import sys\nsys.exit(3)"}, r"mine.py: it calls sys.exit\(3\) when it is imported"),
    ],
)
def test_a_part_that_does_not_load_is_refused_by_name(tmp_path, files, message):
    with pytest.raises(PartError, match=message):
        load_parts([write(tmp_path, **files)])


def test_a_file_that_is_no_python_is_told_what_a_part_is(tmp_path):
    (tmp_path / "tiny.gin").write_text("Online.steps = 3 # of a configuration\nOnline:\n")
    with pytest.raises(PartError, match=r"part .*tiny\.gin: SyntaxError: .*; a part is a Python file"):
        load_parts([tmp_path / "tiny.gin"])


def test_one_part_or_binding_in_place_of_a_list_is_refused():
    def says_seven(completion, example):
        return "7" in completion

    for part, shown in ((says_seven, "[says_seven]"), ("mine.py", "['mine.py']")):
        with pytest.raises(PartError, match=re.escape(f"parts must be a list, even with one part: {shown}")):
            load_config("tiny", parts=part)
    for bindings in ("Online.steps = 3", {"Online.steps": 3}, [3]):
        with pytest.raises(ConfigError, match=re.escape("bindings: pass a list of strings: ['Online.steps = 60', ")):
            load_config("tiny", bindings)


def test_bindings_of_a_generator_are_all_bound():
    config, _ = load_config("tiny", (text for text in ["Online.steps = 3"]))
    assert config.stages[0].steps == 3


def one():
    return 1


def two():
    return 2


def opens(number, other):
    return lambda config: number + other()


def test_rows_given_as_objects_are_hashed_by_their_functions(tmp_path):
    def hash_of(body):
        (tmp_path / "cell.py").write_text(f"def make(config):\n    return {body}\n", encoding="utf-8")
        linecache.clearcache()
        names = {}
        exec(compile((tmp_path / "cell.py").read_text(), tmp_path / "cell.py", "exec"), names)
        return load_parts([{"ENVS": {"Own": Environment(config=Own, open=names["make"])}}]).hashes

    assert hash_of("1") == hash_of("1") != hash_of("2")
    assert list(hash_of("1")) == ["parts[0]"]
    # With what a function uses by name: other functions, and plain values.
    makes = [load_parts([{"ENVS": {"Own": Environment(config=Own, open=opens(*how))}}]).hashes
             for how in ((1, one), (1, one), (2, one), (1, two))]  # fmt: skip
    assert makes[0] == makes[1] and len({str(each) for each in makes}) == 3
    # A function of jrl is that of the version that runs.
    own = [load_parts([{"ENVS": {"Own": Environment(config=Own, open=one)}}]).hashes for one in (tasks_of, digest_of)]
    assert own[0] == own[1]


LAM, NESTED = 0.5, {"lam": [0.5]}


def with_inner_functions(config, leaves):
    def update(gradient, state, params=None):
        return [LAM * x for x in gradient], state

    return optax.GradientTransformation(lambda params: (), update)


def with_a_collection(config, leaves):
    return optax.scale(NESTED["lam"][0])


class WithACall:
    def __call__(self, shard):
        return LAM

    def of_the_object(self, config, leaves):
        return optax.scale(LAM)

    @classmethod
    def of_the_class(cls, config, leaves):
        return optax.scale(LAM)


def with_a_class(config, leaves):
    return WithACall


CYCLE = {"lam": 0.5}
CYCLE["again"] = CYCLE


def with_a_cycle(config, leaves):
    return optax.scale(CYCLE["again"]["lam"])


AN_OBJECT = WithACall()


def with_an_object(config, leaves):
    return AN_OBJECT


RULES = types.ModuleType("own_rules")
RULES.LAM, RULES.scaled = 0.5, one


def with_a_module(config, leaves):
    return optax.scale(RULES.LAM * RULES.scaled())


def with_a_module_around(rules):
    return lambda config, leaves: optax.scale(rules.LAM * rules.scaled())


def with_many_names():
    """Returns a function whose instructions give the name after the module in two parts."""
    names = "; ".join(f"name_{i}" for i in range(300))
    namespace = {"RULES": RULES, "__name__": __name__}
    exec(f"def direction(config, leaves):\n    if leaves is direction: {names}\n    RULES.LAM, RULES.scaled", namespace)
    return namespace["direction"]


def with_rules(backward):
    loss = jax.custom_vjp(one)
    loss.defvjp(two, backward)
    return lambda config, leaves: loss


def with_a_default(lam):
    return lambda config, leaves, lam=lam: optax.scale(lam)


def with_a_tuple(*functions):
    return lambda config, leaves: functions[0](config, leaves)


def compiled(function):
    helper = jax.jit(function)
    return lambda config, leaves: helper(leaves)


def direction_hash(direction):
    return load_parts([{"OPTIMIZERS": {"Own": Optimizer(traced_own(), direction)}}]).hashes["parts[0]"]


@functools.cache
def traced_own():
    return traced(types.new_class("Own", (OptimizerSettings,)))


@pytest.mark.parametrize("read, other", [("LAM", 0.25), ("scaled", opens)])
@pytest.mark.parametrize("direction", [with_a_module, with_a_module_around(RULES), with_many_names()])
def test_the_hash_of_a_row_reads_what_it_uses_of_modules_of_the_user(monkeypatch, direction, read, other):
    before = direction_hash(direction)
    monkeypatch.setattr(RULES, "unused", 0.25, raising=False)
    assert direction_hash(direction) == before
    monkeypatch.setattr(RULES, read, other)
    assert direction_hash(direction) != before


@pytest.mark.parametrize(
    "direction",
    [with_inner_functions, with_a_class, AN_OBJECT.of_the_object, WithACall.of_the_class, with_an_object],
)
def test_the_hash_of_a_row_reads_globals_of_functions_methods_and_classes_inside(monkeypatch, direction):
    before = direction_hash(direction)
    assert direction_hash(direction) == before
    monkeypatch.setitem(globals(), "LAM", 0.25)
    assert direction_hash(direction) != before


def test_the_hash_of_a_row_reads_collections_defaults_arguments_and_compiled_functions(monkeypatch):
    different = [
        *(functools.partial(with_a_default(1.0), lam=lam) for lam in (0.5, 0.25)),
        *map(with_a_default, (0.5, 0.25)),
        *map(with_a_tuple, (one, two)),
        *map(compiled, (one, two)),
        *map(with_rules, (one, opens)),
        *map(functools.wraps(with_a_collection), (lambda config, leaves: one, lambda config, leaves: two)),
    ]
    assert len({*map(direction_hash, different)}) == len(different)
    before = direction_hash(with_a_collection), direction_hash(with_a_cycle)
    monkeypatch.setitem(NESTED, "lam", [0.25])
    monkeypatch.setitem(CYCLE, "lam", 0.25)
    assert direction_hash(with_a_collection) != before[0] and direction_hash(with_a_cycle) != before[1]


def test_the_hash_of_rows_given_as_objects_is_the_same_in_every_process():
    """Where it depended on addresses, no run with a model given as an object could be resumed."""
    text = """
import sys
sys.path[:0] = ["configs/own", "tests"]
import linen_model, test_plugins as own
from jrl.plugins import load_parts
print(load_parts([{"MODELS": linen_model.MODELS}]).hashes["parts[0]"],
      own.direction_hash(own.with_a_tuple(own.one, own.two)))
"""
    command, folder = [sys.executable, "-c", text], pathlib.Path(__file__).parents[1]
    hashes = [subprocess.check_output(command, cwd=folder, text=True) for _ in range(2)]
    assert hashes[0] == hashes[1] and hashes[0].split()[0] != hashes[0].split()[1]


@dataclasses.dataclass(frozen=True)
class Callable:
    """A function that is an object, equal to one with the same fields."""

    def __call__(self, config, leaves):
        return None


def test_only_a_name_that_a_run_lacks_is_told_of_parts_given_as_objects(tmp_path):
    (tmp_path / "manifest.json").write_text('{"identity": {"parts": {"parts[0]": "a hash"}}}', encoding="utf-8")
    (tmp_path / "config.gin").write_text("include 'tiny.gin'\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="no field 'promts'") as refused:
        load_run_config(tmp_path, ["Eval.promts=3"])
    assert "as objects" not in str(refused.value)
    (tmp_path / "config.gin").write_text("include 'tiny.gin'\nOnline.optimizer = @Mine()\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"unknown optimizer 'Mine'.* given as objects"):
        load_run_config(tmp_path)


def test_parts_in_a_binding_for_a_run_that_is_opened_are_refused(tmp_path):
    (tmp_path / "config.gin").write_text("Config.parts = []\n")
    with pytest.raises(ConfigError, match=r"a run is opened with the parts in .*/parts, as it was trained; leave out"):
        load_run_config(tmp_path, ["parts = ['mine.py']"])


def test_rows_given_as_objects_share_no_program_with_an_earlier_load():
    @traced
    class Rates(OptimizerSettings):
        pass

    @dataclasses.dataclass(frozen=True)
    class Drawn:
        pass

    parts = {
        "OPTIMIZERS": {"Rates": Optimizer(Rates, Callable())},
        "STRATEGIES": {"Drawn": Strategy(Drawn, drawing=lambda config, tokenizer: FirstSegment(3))},
    }
    (one, two), (three, four) = (
        (tables["optimizers"]["Rates"], tables["strategies"]["Drawn"].drawing)
        for tables in (load_parts([parts]).tables, load_parts([parts]).tables)
    )
    assert one == one and one.direction != three.direction
    assert two(None, None) == two(None, None) != four(None, None) and two(None, None).roles == ()


def test_a_pipe_given_as_a_part_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "mine.py")
    with pytest.raises(PartError, match=r"mine\.py' is a named pipe, not a file"):
        load_parts([tmp_path / "mine.py"])


def test_a_part_crosses_to_the_workers_unchanged():
    part = load_parts([needs_nothing]).texts[0]
    assert PartSource.from_json(json.loads(json.dumps(part.to_json()))) == part


def needs_nothing(completion, example):
    return True


def GRPO(completion, example):
    return 1.0


@pytest.mark.parametrize(("field", "kind"), [("strategy", "strategy"), ("curriculum", "curriculum")])
def test_an_unknown_part_is_named_by_its_kind(field, kind):
    with pytest.raises(ConfigError, match=f"unknown {kind} 'Nope'"):
        load_config("configs/tiny.gin", [f"Online.{field}=@Nope()"])


def test_a_verifier_with_the_name_of_a_section_is_refused():
    with pytest.raises(PartError, match="part GRPO: 'GRPO' is a section of the configuration"):
        load_parts([GRPO])
