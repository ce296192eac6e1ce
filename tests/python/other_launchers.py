"""Gives `tessera launch` every flag of torchrun and of `accelerate launch`, as their own parsers have them: each is taken, or refused with a reason.

other_launchers.py TESSERA
"""
import concurrent.futures
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

def complaint(program, action, flag):
    """What launch says to a flag that it does not know."""
    value = [] if action.nargs == 0 else [str((list(action.choices) if action.choices else ["1"])[0])]
    done = subprocess.run([TESSERA, "launch", flag, *value, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          env=dict(os.environ, HF_HOME="/no/such/folder"), check=False)
    return f"{flag} of {program}: {done.stderr}" if "there is no flag" in done.stderr else ""


flags = [(program, action, flag) for program, parser in PARSERS.items() for action in parser._actions for flag in action.option_strings]
# Dashes and underscores are the same to launch, so one spelling of each is tried.
flags = list({(program, flag.replace("_", "-")): (program, action, flag) for program, action, flag in flags}.values())
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    unknown = [words for words in pool.map(lambda each: complaint(*each), flags) if words]
assert len(flags) > 50, flags
assert not unknown, "\n".join(unknown)
print(f"{len(flags)} flags of {' and '.join(PARSERS)} are taken or refused with a reason")
