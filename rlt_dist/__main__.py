"""`python -m rlt_dist` is `rlt-dist`; launchers such as torchrun start ranks this way."""

from rlt_dist.cli.main import main

main()
