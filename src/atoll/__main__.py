"""`python -m atoll`."""

import sys

from atoll.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
