"""Gives `tessera launch` every flag of torchrun and of `accelerate launch`, as their own parsers have them: each is taken, or refused with a reason.

other_launchers.py TESSERA
"""
import os
import subprocess
import sys

from torch.distributed.run import get_args_parser

TESSERA = sys.argv[1]
PARSERS = {"torchrun": get_args_parser()}
try:
    from accelerate.commands.launch import launch_command_parser
    PARSERS["accelerate launch"] = launch_command_parser()
except ImportError:
    print("there is no package accelerate")

tried, unknown = 0, []
for program, parser in PARSERS.items():
    for action in parser._actions:
        for flag in action.option_strings:
            value = [] if action.nargs == 0 else [str((list(action.choices) if action.choices else ["1"])[0])]
            done = subprocess.run([TESSERA, "launch", flag, *value, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  env=dict(os.environ, HF_HOME="/no/such/folder"), check=False)
            tried += 1
            if "there is no flag" in done.stderr or "Traceback" in done.stderr:
                unknown.append(f"{flag} of {program}: {done.stderr}")
assert tried > 50, tried
assert not unknown, "\n".join(unknown)
print(f"{tried} flags of {' and '.join(PARSERS)} are taken or refused with a reason")
