# SPDX-License-Identifier: Apache-2.0
"""Entry point of ``python -m lab``."""

import sys

from lab import cli

if __name__ == '__main__':
    sys.exit(cli.main())
