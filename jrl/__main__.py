"""`python -m jrl` is the command `jrl`."""

import sys

from jrl.cli import main

sys.exit(main())
