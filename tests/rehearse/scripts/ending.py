"""Trains, and ends in the way that the first argument names. argparse-free: what is tested is the end."""

import atexit
import os
import signal
import sys
import time

import torch

how = sys.argv[1]
weight = torch.zeros(2, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
second = torch.optim.SGD([torch.zeros(1, device="cuda", requires_grad=True)], lr=0.1)
atexit.register(lambda: print("exit handler"))


def step():
    weight.sum().backward()
    optimizer.step()
    second.step()


done = 0
if how == "swallow":
    while done < 100:
        try:
            step()
            done += 1
        except BaseException:
            print("caught")
elif how == "finally":
    try:
        while True:
            try:
                step()
            except Exception:
                print("caught as an error")
            done += 1
    finally:
        print("finally", done)
for _ in range(2):
    step()
if how == "number":
    sys.exit(7)
if how == "raise":
    raise ValueError("of its own")  # MARK raise
if how == "leave":
    os._exit(5)
if how == "unsupported":
    torch.cuda.CUDAGraph()  # MARK unsupported
if how in ("SIGTERM", "SIGKILL"):
    time.sleep(0.2)
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(20)
