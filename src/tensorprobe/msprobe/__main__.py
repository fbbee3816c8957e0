"""`python -m tensorprobe.msprobe`: msprobe's command line, for the verbs that have one here."""

import sys

from tensorprobe.peers.msprobe.msprobe_command import main

sys.exit(main())
