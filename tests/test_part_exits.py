"""A part that ends the process when it is imported is refused with a message; jrl goes on."""

from __future__ import annotations

import pytest

import jrl
from jrl import cli
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
