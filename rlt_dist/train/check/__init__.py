"""Every mesh held to the result of one process: `rlt-dist verify mesh`.

campaign  which runs there are, started as ranks on this machine;  case  one run, on its ranks
"""
