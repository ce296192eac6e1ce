"""Two ranks, forked from one interpreter, because to import torch takes longer than what they do."""
import os
import traceback


def fork_ranks(act):
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                act(rank)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children), "a rank has failed"
