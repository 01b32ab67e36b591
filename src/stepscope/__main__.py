import sys

from stepscope.cli.main import main

sys.exit(main())
