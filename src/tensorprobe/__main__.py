"""`python -m tensorprobe` is the command line, for torchrun and for source trees."""

import sys

from tensorprobe.cli.main import main

sys.exit(main())
