"""Meshes held to each other: `rlt-dist verify mesh`, `rlt-dist verify resume`.

campaign     every mesh held to one process: which runs there are;  case         one, on its ranks
resume       runs that go on on another mesh: which there are;      resume_case  one, on its ranks
launch       cases handed to ranks on this machine
"""
