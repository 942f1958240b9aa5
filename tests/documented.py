"""The parts files that docs/bring-your-own.md shows."""

import re
from pathlib import Path


def write_part(heading, folder):
    """Writes the first Python file under a heading of the page, and returns its path."""
    text = (Path(__file__).parents[1] / "docs" / "bring-your-own.md").read_text(encoding="utf-8")
    path = folder / "my_parts.py"
    path.write_text(re.search(rf"^## {heading}$.*?^```python\n(.*?)^```", text, re.S | re.M)[1], encoding="utf-8")
    return path
