"""A part that ends the process when it is imported is refused with a message; jrl goes on."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from test_step_parts import token_batch

import jrl
from jrl import cli
from jrl.learning.learner import ModelOutputs, token_terms
from jrl.plugins import PartError, load_parts
from jrl.resolve import find_config


@pytest.mark.parametrize(("call", "shown"), [("sys.exit()", "None"), ("sys.exit(3)", "3"), ("quit('bye')", "'bye'")])
def test_a_part_that_exits_at_import_is_refused(tmp_path, call, shown):
    path = tmp_path / "part.py"
    path.write_text(f"import sys\n{call}\nVERIFIERS = {{}}\n")
    with pytest.raises(PartError) as refused:
        load_parts([path])
    assert f"part {path}: it calls sys.exit({shown}) when it is imported" in str(refused.value)


def test_the_command_says_so_with_the_code_of_a_refusal(tmp_path, capsys):
    (tmp_path / "part.py").write_text("import sys\nsys.exit(0)\n")
    gin = tmp_path / "mine.gin"
    gin.write_text(f"include '{find_config('tiny')}'\nparts = ['part.py']\n")
    args = cli.parser_of("train").parse_args([str(gin)])
    assert cli.guarded(lambda args: jrl.load_config(args.config) and 0, args) == 2
    assert "it calls sys.exit(0) when it is imported" in capsys.readouterr().err


OBJECTIVE = (
    "{above}\nfrom jrl.algos.grpo import OBJECTIVE, GRPO\nfrom jrl.types import traced\n"
    "@traced\nclass Mine(GRPO):\n    pass\n{below}\n"
    "ALGOS = {{'Mine': OBJECTIVE._replace(config=Mine, token_loss=token_loss)}}\n"
)


def exit_code_of_the_loss(part):
    """Returns the exit code of a command that asks for the loss of the objective Mine of a part."""
    objective = load_parts([part]).tables["algos"]["Mine"]
    batch, outputs = token_batch(None), ModelOutputs(jnp.zeros((1, 3)), *[None] * 5)

    def command(args):
        token_terms(outputs, batch, objective.config(), (), objective)
        return 0

    return cli.guarded(command, cli.parser_of("train").parse_args(["tiny"]))


def test_so_does_an_error_in_a_module_that_a_part_imports(tmp_path, capsys):
    (tmp_path / "own_losses.py").write_text("def token_loss(config, tokens, state):\n    return tokens.advantage, {}\n")
    part = tmp_path / "part.py"
    part.write_text(OBJECTIVE.format(above="from own_losses import token_loss", below=""))
    assert exit_code_of_the_loss(part) == 4
    assert f"It was raised by your own {tmp_path / 'own_losses.py'}, line 2, in token_loss" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('oops')", "ValueError: oops"),
        ("return tokens.advantage, {}", "AttributeError: 'Tokens' object has no attribute 'advantage'"),
        ("return jnp.dot(tokens.advantages, jnp.ones(3)), {}", "TypeError: "),  # raised inside of JAX
    ],
)
def test_an_error_in_a_part_names_its_line_and_is_not_called_internal(tmp_path, capsys, body, said):
    part = tmp_path / "part.py"
    function = f"def token_loss(config, tokens, state):\n    {body}"
    part.write_text(OBJECTIVE.format(above="import jax.numpy as jnp", below=function))
    assert exit_code_of_the_loss(part) == 4
    shown = capsys.readouterr().err
    assert said in shown and "internal" not in shown and "Traceback" not in shown
    assert f"It was raised by your own {part}, line 8, in token_loss" in shown


@pytest.mark.parametrize(
    ("body", "said", "line", "code"),
    [
        ("return tokens.logprobs.sum(), {}", "and its loss has the shape []\nIt was returned by your own ", 7, 4),
        (
            "return surrogate.policy_gradient(tokens.logprobs, None, tokens.mask), {}",
            "\nIt was raised by jrl.ops.surrogate.policy_gradient, called from your own ",
            8,
            4,
        ),
        # What jrl refuses in words.
        (
            "return contract.preferences(conformance.sample_groups()), {}",
            "has compared these rows\nIt was raised by jrl.algos.contract.preferences, called from your own ",
            8,
            2,
        ),
    ],
)
def test_so_does_a_wrong_result_and_an_error_in_what_a_part_calls(tmp_path, capsys, body, said, line, code):
    part = tmp_path / "part.py"
    function = f"def token_loss(config, tokens, state):\n    {body}"
    imported = "from jrl.algos import conformance, contract; from jrl.ops import surrogate"
    part.write_text(OBJECTIVE.format(above=imported, below=function))
    assert exit_code_of_the_loss(part) == code
    shown = capsys.readouterr().err
    assert f"{said}{part}, line {line}, in token_loss." in shown and "internal" not in shown


def test_out_of_memory_under_a_part_is_no_fault_of_its_line(tmp_path, capsys):
    part = tmp_path / "part.py"
    body = "raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes')"
    function = f"def token_loss(config, tokens, state):\n    {body}"
    part.write_text(OBJECTIVE.format(above="import jax", below=function))
    assert exit_code_of_the_loss(part) == 4
    shown = capsys.readouterr().err
    assert "Out of device memory" in shown and "your own" not in shown
