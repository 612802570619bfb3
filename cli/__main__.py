"""Lets ``python -m cli`` stand in for the ``bioptimus`` command."""

import sys

from cli.main import main

sys.exit(main())
