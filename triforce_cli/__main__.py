"""`python -m triforce_cli`, the same as the console script `triforce`."""

import sys

from triforce_cli.app import main

sys.exit(main())
