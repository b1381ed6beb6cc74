"""Ends in the way that its first argument names."""
import atexit
import os
import pickle
import signal
import sys
import threading
import time

import torch


class Kept:
    """Pickled by name from __main__ when the interpreter ends."""


def late():
    time.sleep(0.3)
    print("thread", torch.ones(1).cuda().device.type, flush=True)


def fail():
    raise ValueError("the script's own")


atexit.register(lambda: print("atexit", torch.zeros(1, device="cuda").device.type, type(pickle.loads(pickle.dumps(Kept()))).__name__))
x = torch.ones(2, device="cuda")
how = sys.argv[1]
if how == "return":
    threading.Thread(target=late).start()
elif how == "number":
    sys.exit(7)
elif how == "none":
    sys.exit()
elif how == "text":
    sys.exit("stopped by the script")
elif how == "raise":
    fail()
elif how == "chain":
    try:
        fail()
    except ValueError as error:
        raise RuntimeError("second") from error
elif how == "inside":
    torch.zeros(2, device="cuda", nonsense=1)
elif how == "unsupported":
    torch.cuda.CUDAGraph()
elif how == "hook":
    sys.excepthook = lambda kind, error, trace: print("hook", kind.__name__, file=sys.stderr)
    fail()
elif how == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
elif how == "leave":
    sys.stdout.flush()
    os._exit(5)
elif how == "fork":
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
