"""`python -m arlopti_openrlhf` is the console command `arlopti`."""

from arlopti_openrlhf.cli.main import main

main()
