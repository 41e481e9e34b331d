"""`python -m kvtools` is the `kvstore` command."""

import sys

from kvtools.cli import main

sys.exit(main())
